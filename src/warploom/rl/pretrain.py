"""Pre-training one policy on many kernels under the timing model, and what it is worth elsewhere.

    python -m warploom.rl.pretrain A.cubin B.cubin --hold-out C.cubin -o DIR --steps 20000

First the policy imitates: `--lessons` states of each kernel, on climbs under the model, with what a
sample of their actions gains (fewer than one in a hundred gains anything, so that rewards alone
teach nothing in a few thousand steps). Then it plays `--steps` steps; every episode begins at the
compiled code, so what is learned is how to gain quickly. The policy has no weight that knows a
kernel, so it plays the held-out ones too: `report.json` says how often its choice gains there and
how far it gets in so many steps, beside a policy with no training. Ctrl-C keeps the last
checkpoint; the same command goes on from it. `warploom tune --search ppo-guided --policy
DIR/checkpoint.pt` starts from it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from warploom.errors import InputError, WarploomError
from warploom.files import write_text_atomically
from warploom.rl.env import AssemblyGame, make_env
from warploom.rl.imitate import Lesson, hit_rates, imitate, lessons
from warploom.rl.profile import WIDE, Profile
from warploom.rl.train import CHECKPOINT, Trainer

HORIZON: Final = 64
LINES: Final = 144
EVALUATED_STEPS: Final = 200
EVALUATIONS: Final = 3
SAMPLED: Final = 128
JUDGED: Final = 12


def training_profile() -> Profile:
    """The wide profile on the hottest blocks only, every episode from the compiled code.

    The network's weights do not depend on how many lines there are, so what is learned on few plays
    on many.
    """
    ppo = replace(WIDE.ppo, steps=HORIZON, minibatch=64)
    return replace(WIDE, restart=0.0, horizon=HORIZON, lines=LINES, hot=LINES, ppo=ppo)


def evaluate(policy: Trainer, cubin: Path, steps: int, seed: int) -> list[float]:
    """Best modelled speed-up after each step of one game played by sampling from a policy."""
    env = make_env(cubin, profile=replace(training_profile(), restart=1.0, horizon=steps))
    seen, _ = env.reset(seed=seed)
    policy.model.set_random_seed(seed)
    curve: list[float] = []
    for _ in range(steps):
        action, _ = policy.model.predict(seen, action_masks=env.action_masks())
        seen, _, ended, cut, _ = env.step(int(action))
        curve.append(env.best_speedup)
        if ended or cut:
            seen, _ = env.reset()
    return curve


def compare(trained: Trainer, kernels: list[Path], steps: int) -> dict[str, Any]:
    """Trained against untrained on kernels, mean over a few games each (modelled, not measured)."""
    game: AssemblyGame = trained.envs[0]
    report: dict[str, Any] = {}
    for path in kernels:
        blank = Trainer([game], trained.profile, trained.seed)
        curves = {
            name: np.mean(
                [evaluate(policy, path, steps, seed) for seed in range(EVALUATIONS)], axis=0
            )
            for name, policy in (("trained", trained), ("untrained", blank))
        }
        taught = lessons(make_env(path, profile=trained.profile), JUDGED, SAMPLED, trained.seed + 1)
        blind, chosen = hit_rates(trained.model, taught)
        report[path.stem] = {
            **{
                name: {str(at): round(float(curve[at - 1]), 5) for at in (steps // 4, steps)}
                for name, curve in curves.items()
            },
            "actions_that_gain": {"chosen blindly": blind, "chosen by the policy": chosen},
        }
    return report


def teach(trainer: Trainer, states: int, epochs: int, seed: int) -> None:
    """Imitation on `states` states of each of a trainer's kernels."""
    found: list[Lesson] = []
    for env in trainer.envs:
        mine = lessons(env, states, SAMPLED, seed)
        print(
            f"{env.board.kernel.name}: {np.mean([one.share for one in mine]):.2%} of "
            f"{len(mine) * SAMPLED} actions gain",
            file=sys.stderr,
            flush=True,
        )
        found += mine
    losses = imitate(trainer.model, found, epochs, seed)
    print(f"imitation: loss {losses[0]:.3f} to {losses[-1]:.3f}", file=sys.stderr, flush=True)
    trainer.save()


def main(
    kernels: Annotated[list[Path], typer.Argument(help="cubins to train on")],
    out: Annotated[Path, typer.Option("-o", "--out", help="folder for checkpoint and report")],
    hold_out: Annotated[list[Path] | None, typer.Option(help="cubins to evaluate on")] = None,
    steps: Annotated[int, typer.Option(help="training steps in all")] = 20_000,
    taught: Annotated[int, typer.Option("--lessons", help="states of each kernel to imitate")] = 0,
    epochs: Annotated[int, typer.Option(help="passes over the lessons")] = 40,
    seed: Annotated[int, typer.Option(help="seed")] = 0,
) -> None:
    """Train one policy on several kernels under the timing model."""
    try:
        profile = training_profile()
        envs = [make_env(path, profile=profile) for path in kernels]
        trainer = Trainer(envs, profile, seed, out, steps, _say)
        if (out / CHECKPOINT).is_file():
            trainer.resume()
            print(f"going on at step {trainer.steps}", file=sys.stderr)
        elif taught:
            teach(trainer, taught, epochs, seed)
        trainer.learn()
        held = hold_out or []
        if not held:
            return
        report = {
            "trained_on": [path.name for path in kernels],
            "steps": trainer.steps,
            "scores": "modelled, not measured",
            "held_out": compare(trainer, held, EVALUATED_STEPS),
        }
    except KeyboardInterrupt:
        raise InputError("interrupted; the same command goes on") from None
    except WarploomError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    write_text_atomically(out / "report.json", json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["held_out"], indent=1))


def _say(trainer: Trainer) -> None:
    best = " ".join(f"{env.best_speedup:.4f}" for env in trainer.envs)
    print(f"step {trainer.steps}: {best}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
