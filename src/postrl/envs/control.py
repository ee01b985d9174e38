"""Where the Q-function question lives: swing a pendulum up, from imitation policies, with Stable-Baselines3's TD3.

Off-policy control with a critic Q(s, a): another world than the rollouts, groups and tokens of the rest, and none of
its seams. arXiv 2607.27203 asks whether a pretrained policy should come with a pretrained critic, and proposes to
regress the critic on the pooled rollouts of several policies. Its text and code were not at hand; this follows the
reconstruction [R1]:

    1. π_1 … π_N imitate the same offline data D, each from its own start and its own bootstrap of the episodes.
    2. R = their rollouts together, M episodes in all.
    3. Q is regressed on batches half from R, half from D:  y = r + γ · max_n min_j Q̄_j(s', π_n(s')).
    4. TD3 goes on from π_1 with a replay of R ∪ D and this Q.

gymnasium's Pendulum-v1 never ends, it only stops at 200 steps: every target bootstraps. Actions are those TD3 sees,
−1 … 1. Environment steps that filled R are charged to whoever uses them.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from postrl.errors import UserError

try:
    import gymnasium
    from stable_baselines3 import TD3
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.torch_layers import create_mlp
    from stable_baselines3.common.utils import polyak_update
except ImportError as error:
    raise UserError(f"the control problem needs {error.name}: pip install 'postrl[control]'") from error

WORLD, STEPS = "Pendulum-v1", 200  # of an episode
TORQUE = 2.0  # of an action of 1
GAMMA, WIDTH, BATCH = 0.98, 64, 128

Critic = Callable[[Tensor, Tensor], Sequence[Tensor]]  # observations, actions [n, 1] -> twin values [n, 1]
Player = Callable[[np.ndarray], float]  # observation [3] -> action
Arm = Literal["random", "single", "pooled", "pooled buffer", "dealt"]


@dataclass(frozen=True)
class Transitions:
    """Steps of the world, in order, `episodes` of equal length."""

    observations: Float[np.ndarray, "n 3"]
    actions: Float[np.ndarray, "n 1"]
    rewards: Float[np.ndarray, "n"]
    following: Float[np.ndarray, "n 3"]
    episodes: int

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def returns(self) -> Float[np.ndarray, "N"]:
        """Undiscounted, of each episode."""
        return self.rewards.reshape(self.episodes, -1).sum(1)

    def pick(self, episodes: Int[np.ndarray, "N"]) -> "Transitions":
        """These episodes, as often as they are named."""
        length = len(self) // self.episodes
        index = (episodes[:, None] * length + np.arange(length)).ravel()
        fields = (x[index] for x in (self.observations, self.actions, self.rewards, self.following))
        return Transitions(*fields, episodes=len(episodes))

    def dealt(self, seed: int) -> "Transitions":
        """The same steps, their rewards dealt anew among them: the level of the rewards is all they tell."""
        return replace(self, rewards=np.random.default_rng([seed, 6]).permutation(self.rewards))


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Defaults: minutes of one core."""

    demonstrations: int = 20  # episodes of D
    policies: int = 5  # N
    rollouts: int = 20  # M, episodes in all
    imitation_steps: int = 1000
    critic_steps: int = 3000
    online_steps: int = 8000
    evaluate_every: int = 1000
    evaluation_episodes: int = 10

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1 or self.rollouts % self.policies:
            raise UserError(f"{self}: every size must be at least 1, and rollouts a multiple of policies")


@dataclass(frozen=True)
class Curve:
    """One run. Entry i was measured after `steps[i]` environment steps, those for R included.

    gap: mean |Q_init(s, a) − Q^π(s, a)| over states and actions of the policy at that time, Q^π by its true returns.
    """

    arm: str
    seed: int
    steps: list[int]
    returns: list[float]
    gap: list[float]


def swing_up(observation: Float[np.ndarray, "3"]) -> float:
    """A controller by hand: feed energy slowly, catch near the top; an action before noise, −1 … 1.

    With torque u, energy E = θ̇²/6 + 5 cos θ changes by u·θ̇ and is 5 at rest on top.
    """
    cosine, sine, speed = (float(x) for x in observation)
    if cosine > 0.92:
        torque = -(12 * float(np.arctan2(sine, cosine)) + 3 * speed)
    else:
        torque = 0.4 * (5 - speed**2 / 6 - 5 * cosine) * (speed + 0.2 * float(np.sign(speed)))
    return float(np.clip(torque / TORQUE, -1, 1))


def demonstrate(episodes: int, seed: int, noise: float = 0.6) -> Transitions:
    """D: the controller by hand with normal noise on its actions."""
    rng = np.random.default_rng([seed, 0])
    return _play([lambda o: swing_up(o) + noise * float(rng.standard_normal())] * episodes, (seed, 0))


def imitate(data: Transitions, seed: int, steps: int) -> nn.Sequential:
    """An actor that imitates a bootstrap of the episodes: mean squared error of the action."""
    rng = np.random.default_rng([seed, 1])
    torch.manual_seed(int(rng.integers(2**31)))
    actor = nn.Sequential(*create_mlp(3, 1, [WIDTH, WIDTH], squash_output=True))
    chosen = data.pick(rng.integers(data.episodes, size=data.episodes))
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    for _ in range(steps):
        observations, actions, *_ = _batch(chosen, BATCH, rng)
        optimizer.zero_grad()
        (actor(observations) - actions).square().mean().backward()
        optimizer.step()
    return actor


def rollouts(actors: Sequence[nn.Module], episodes: int, seed: int, noise: float = 0.1) -> Transitions:
    """R: `episodes` in all, the actors taking turns, with normal noise on their actions."""
    rng = np.random.default_rng([seed, 2])
    players = [_player(actors[number % len(actors)], noise, rng) for number in range(episodes)]
    return _play(players, (seed, 2))


def agent(actor: nn.Module, replay: Sequence[Transitions], seed: int) -> TD3:
    """TD3 that starts from a copy of the actor, with a fresh critic and these transitions in its replay."""
    made = TD3(
        "MlpPolicy",
        gymnasium.make(WORLD),
        gamma=GAMMA,
        batch_size=BATCH,
        learning_starts=0,
        train_freq=(1, "step"),
        gradient_steps=1,
        action_noise=NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)),
        policy_kwargs={"net_arch": [WIDTH, WIDTH]},
        buffer_size=200_000,
        seed=seed,
        device="cpu",
    )
    for each in (made.actor, made.actor_target):
        each.mu.load_state_dict(actor.state_dict())
    assert made.replay_buffer is not None
    for part in replay:
        for o, a, r, f in zip(part.observations, part.actions, part.rewards, part.following, strict=True):
            made.replay_buffer.add(o[None], f[None], a[None], r[None], np.zeros(1), [{}])
    return made


def pretrain_critic(
    learner: TD3, offline: Transitions, pooled: Transitions, actors: Sequence[nn.Module], steps: int, seed: int
) -> None:
    """Step 3: regress the learner's twin critics; with one actor this is naive pretraining."""
    rng = np.random.default_rng([seed, 3])
    for _ in range(steps):
        halves = zip(_batch(offline, BATCH // 2, rng), _batch(pooled, BATCH // 2, rng), strict=True)
        observations, actions, rewards, following = (torch.cat(pair) for pair in halves)
        with torch.no_grad():
            target = rewards + GAMMA * best_value(learner.critic_target, actors, following)
        loss = sum((q[:, 0] - target).square().mean() for q in learner.critic(observations, actions))
        assert isinstance(loss, Tensor)
        learner.critic.optimizer.zero_grad()
        loss.backward()
        learner.critic.optimizer.step()
        polyak_update(learner.critic.parameters(), learner.critic_target.parameters(), learner.tau)


def best_value(critic: Critic, actors: Sequence[nn.Module], observations: Float[Tensor, "n 3"]) -> Float[Tensor, "n"]:
    """The value of the action that is best among those of the actors."""
    return torch.stack([value(critic, observations, actor(observations)) for actor in actors]).amax(0)


def value(critic: Critic, observations: Float[Tensor, "n 3"], actions: Float[Tensor, "n 1"]) -> Float[Tensor, "n"]:
    """The smaller of the twin critics."""
    return torch.cat(list(critic(observations, actions)), 1).amin(1)


def mean_return(actor: nn.Module, episodes: int, seed: int) -> float:
    """Undiscounted, without noise; the same starts for every policy."""
    return float(_play([_player(actor, 0.0, None)] * episodes, (seed, 4)).returns.mean())


def value_gap(critic: Critic, actor: nn.Module, episodes: int, seed: int) -> float:
    """E |Q(s, a) − Q^π(s, a)| over the first `STEPS` states and actions of noiseless episodes.

    The episodes run twice as long, so that what each return leaves out weighs γ^200 = 0.02 at most.
    """
    played = _play([_player(actor, 0.0, None)] * episodes, (seed, 5), 2 * STEPS)
    rewards = played.rewards.reshape(episodes, -1)
    returns = np.zeros_like(rewards)
    running = np.zeros(episodes)
    for step in reversed(range(rewards.shape[1])):
        running = rewards[:, step] + GAMMA * running
        returns[:, step] = running
    early = (np.arange(len(played)) % (2 * STEPS)) < STEPS
    with torch.no_grad():
        inputs = (torch.from_numpy(x[early]).float() for x in (played.observations, played.actions))
        estimated = value(critic, *inputs).numpy()
    return float(np.abs(estimated - returns.ravel()[early]).mean())


def compare(arm: Arm, seed: int, sizes: Sizes = Sizes(), learner_seed: int | None = None) -> Curve:
    """One run of one arm. Runs of one seed share D, the imitation policies, and the starts of every evaluation.
    learner_seed: of the fresh critic and of TD3's own chance, by default the same `seed`.

    random: replay D, fresh critic. single: R by π_1 alone, critic regressed on it. pooled: R by all policies, critic by
    step 3 (the paper's proposal). pooled buffer: that R in the replay, but a fresh critic; data without initialisation.
    dealt: as pooled, but the critic is regressed on rewards dealt anew; a level of values without knowledge.
    """
    learner_seed = seed if learner_seed is None else learner_seed
    offline = demonstrate(sizes.demonstrations, seed)
    alone = arm == "single"
    count = 1 if alone or arm == "random" else sizes.policies
    actors = [imitate(offline, 1000 * seed + n, sizes.imitation_steps) for n in range(count)]
    pooled = None if arm == "random" else rollouts(actors, sizes.rollouts, seed)
    learner = agent(actors[0], [offline] if pooled is None else [offline, pooled], learner_seed)
    if pooled is not None and arm != "pooled buffer":
        shown = (offline.dealt(seed), pooled.dealt(seed)) if arm == "dealt" else (offline, pooled)
        pretrain_critic(learner, *shown, actors, sizes.critic_steps, seed)
    charged = 0 if pooled is None else len(pooled)
    first = copy.deepcopy(learner.critic)
    curve = Curve(arm, seed, [], [], [])
    torch.manual_seed(learner_seed)
    np.random.seed(learner_seed)  # TD3 draws its batches and its noise from the global generator
    for done in range(0, sizes.online_steps + 1, sizes.evaluate_every):
        if done:
            learner.learn(sizes.evaluate_every, reset_num_timesteps=False)
        curve.steps.append(charged + done)
        curve.returns.append(mean_return(learner.actor.mu, sizes.evaluation_episodes, seed))
        curve.gap.append(value_gap(first, learner.actor.mu, sizes.evaluation_episodes, seed))
    return curve


def _player(actor: nn.Module, noise: float, rng: np.random.Generator | None) -> Player:
    def act(observation: np.ndarray) -> float:
        with torch.no_grad():
            action = float(actor(torch.from_numpy(observation)[None])[0, 0])
        return action if rng is None else action + noise * float(rng.standard_normal())

    return act


def _play(players: Sequence[Player], key: tuple[int, ...], length: int = STEPS) -> Transitions:
    """An episode of each player; episode i starts where `default_rng((*key, i))` says."""
    world = gymnasium.make(WORLD, max_episode_steps=length)
    rows: list[tuple] = []
    for number, act in enumerate(players):
        start = int(np.random.default_rng([*key, number]).integers(2**31))
        observation = world.reset(seed=start)[0]
        for _ in range(length):
            action = np.clip(np.array([act(observation)], dtype=np.float32), -1, 1)
            following, reward, *_ = world.step(TORQUE * action)
            rows.append((observation, action, reward, following))
            observation = following
    observations, actions, rewards, following = (np.array(x, dtype=np.float32) for x in zip(*rows, strict=True))
    return Transitions(observations, actions, rewards, following, len(players))


def _batch(data: Transitions, size: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = rng.integers(len(data), size=size)
    fields = (data.observations, data.actions, data.rewards, data.following)
    observations, actions, rewards, following = (torch.from_numpy(x[index]) for x in fields)
    return observations, actions, rewards, following
