"""Networks of the learned players, as policies of sb3-contrib's MaskablePPO.

`cnn`: CuAsmRL's, three convolutions over the listing (5x3 stride 2x1, 4 stride 2, 3; 32, 64, 64
channels), a layer of 512, actor and critic heads.
`graph`: attention of every line over its partners in the dependence graph, then one head that
scores each line's actions from that line alone. It has no weight that knows a kernel's size or
order, so one policy plays any kernel.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# Torch and SB3 leave much untyped; what is ours is checked.

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from warploom.rl.observe import EDGE_COLUMNS, GRAPH_COLUMNS
from warploom.rl.profile import Profile

WIDTH: Final = 32
HEADS: Final = 2
LAYERS: Final = 2
CRITIC: Final = 64
CNN_FEATURES: Final = 512
HEAD_GAIN: Final = 0.01


class ListingCnn(BaseFeaturesExtractor):
    """CuAsmRL's convolutions: [B, lines, columns] -> [B, 512]."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, CNN_FEATURES)
        convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (5, 3), (2, 1)),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = convolutions(torch.zeros(1, 1, *observation_space.shape)).shape[1]
        self.net = nn.Sequential(convolutions, nn.Linear(flat, CNN_FEATURES), nn.ReLU())

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Features of a batch of listings."""
        return self.net(observations.unsqueeze(1))


class PartnerAttention(nn.Module):
    """One round of attention of each line over its partners, itself and the mean of all lines."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.edge = nn.Linear(EDGE_COLUMNS, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.feed_norm = nn.LayerNorm(WIDTH)

    def forward(
        self, lines: torch.Tensor, index: torch.Tensor, edges: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """lines [B, N, W], index [B, N, P] into N + 1 (the last: nobody), edges [B, N, P, 3]."""
        batch, count, _ = lines.shape
        partners = index.shape[2]
        both = self.key_value(lines)
        padded = torch.cat([both, torch.zeros_like(both[:, :1])], 1)
        # Rows picked from one flat table: their gradient is a plain sum.
        base = torch.arange(batch).view(-1, 1, 1) * (count + 1)
        picked = padded.flatten(0, 1).index_select(0, (index + base).flatten())
        picked = picked.view(batch, count, partners, 2 * WIDTH) + self.edge(edges)
        depth = WIDTH // HEADS
        query = self.query(lines).view(batch, count, 1, HEADS, depth)
        keys, values = picked.view(batch, count, partners, 2, HEADS, depth).unbind(3)
        own_key, own_value = both.view(batch, count, 1, 2, HEADS, depth).unbind(3)
        score = torch.cat([(query * keys).sum(-1), (query * own_key).sum(-1)], 2)
        nobody = torch.cat([index == count, torch.zeros_like(index[:, :, :1]).bool()], 2)
        score = (score / math.sqrt(depth)).masked_fill(nobody.unsqueeze(-1), -1e9).softmax(2)
        mixed = (score[:, :, :partners].unsqueeze(-1) * values).sum(2)
        mixed = (mixed + score[:, :, partners].unsqueeze(-1) * own_value[:, :, 0]).flatten(2)
        lines = self.norm(lines + self.out(torch.cat([mixed, _mean(lines, present)], -1)))
        return self.feed_norm(lines + self.feed(lines))


def _mean(lines: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """The mean of the lines that there are, for every line [B, N, W]."""
    total = (lines * present).sum(1, keepdim=True) / present.sum(1, keepdim=True).clamp(min=1.0)
    return total.expand_as(lines)


class GraphNet(BaseFeaturesExtractor):
    """The dependence graph: dict observation -> [B, (N + 1) * WIDTH], the last row the mean."""

    def __init__(self, observation_space: spaces.Dict) -> None:
        count = observation_space["lines"].shape
        assert count is not None
        super().__init__(observation_space, (count[0] + 1) * WIDTH)
        self.enter = nn.Linear(GRAPH_COLUMNS, WIDTH)
        self.rounds = nn.ModuleList(PartnerAttention() for _ in range(LAYERS))

    def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
        """Features of a batch of graphs."""
        room = observations["lines"].shape[1]
        # Rows past the longest kernel of the batch are empty: work on the others only.
        used = int(observations["lines"][:, :, -1].sum(1).max())
        seen = observations["lines"][:, :used]
        present = seen[:, :, -1:]
        lines = torch.relu(self.enter(seen))
        index = observations["partners"][:, :used].long().clamp(max=used)
        edges = observations["edges"][:, :used]
        for attention in self.rounds:
            lines = attention(lines, index, edges, present)
        empty = torch.zeros(len(lines), room - used, WIDTH)
        return torch.cat([lines, empty, _mean(lines, present)[:, :1]], 1).flatten(1)


class LineHeads(nn.Module):
    """Scores of every action from its own line, and the critic's features from the mean."""

    def __init__(self, lines: int, kinds: int) -> None:
        super().__init__()
        self.lines = lines
        self.latent_dim_pi = lines * kinds
        self.latent_dim_vf = CRITIC
        self.actor = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, kinds))
        self.critic = nn.Sequential(nn.Linear(WIDTH, CRITIC), nn.Tanh())

    def _rows(self, features: torch.Tensor) -> torch.Tensor:
        """The lines' features and their mean [B, lines + 1, WIDTH]."""
        return features.view(len(features), self.lines + 1, WIDTH)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits of all actions [B, lines * kinds], critic features [B, 64])."""
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: torch.Tensor) -> torch.Tensor:
        """Logits of all actions."""
        rows = self._rows(features)
        lines, mean = rows[:, :-1], rows[:, -1:]
        return self.actor(torch.cat([lines, mean.expand_as(lines)], -1)).flatten(1)

    def forward_critic(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the value head."""
        return self.critic(self._rows(features)[:, -1])


class LinePolicy(MaskableActorCriticPolicy):
    """A maskable policy whose logits come line by line from the graph network."""

    def __init__(self, *args: Any, lines: int, kinds: int, **more: Any) -> None:
        self._lines, self._kinds = lines, kinds
        super().__init__(*args, features_extractor_class=GraphNet, **more)

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor: Any = LineHeads(self._lines, self._kinds)

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net = nn.Identity()
        last = self.mlp_extractor.actor[-1]
        nn.init.orthogonal_(last.weight, HEAD_GAIN)
        nn.init.zeros_(last.bias)
        self.optimizer = torch.optim.Adam(
            self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs
        )


def policy_of(profile: Profile) -> tuple[type[MaskableActorCriticPolicy], dict[str, Any]]:
    """The policy class of a profile and what to construct it with."""
    adam = {"optimizer_kwargs": {"eps": profile.ppo.adam_eps}}
    if profile.network == "graph":
        return LinePolicy, {"lines": profile.lines, "kinds": len(profile.kinds), **adam}
    return MaskableActorCriticPolicy, {
        "features_extractor_class": ListingCnn,
        "net_arch": [],
        "normalize_images": False,
        **adam,
    }


def parameters(policy: nn.Module) -> int:
    """How many numbers a policy learns."""
    return int(sum(np.prod(p.shape) for p in policy.parameters()))
