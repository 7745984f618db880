"""Replay files: the actions that lead from a cubin as compiled to a player's best state.

    python -m warploom.rl.replay replay.json original.cubin -o best.cubin

The file names the original, the profile, every action in words and the hash of the result;
replaying takes the same actions through the same masks and must end with the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from warploom.errors import CheckFailed, InputError, WarploomError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.rl.env import AssemblyGame, make_env
from warploom.sass.decode.cubin import Cubin, load

SCHEMA: Final = 1


@dataclass(frozen=True)
class Replay:
    """A path of actions. `speedup` is what the player's scorer said of the result."""

    schema: int
    kernel: str
    original_sha256: str
    profile: str
    mode: str
    speedup: float
    sha256: str
    actions: tuple[int, ...]
    words: tuple[str, ...]

    @classmethod
    def of(cls, env: AssemblyGame) -> Replay:
        """The replay of an environment's best state."""
        standing = env.board.snapshot()
        path = list(env.best_path)
        env.follow(path)
        board, image = env.board, env.board.candidate().cubin
        found = cls(
            SCHEMA,
            board.kernel.name,
            hashlib.sha256(env.original.data).hexdigest(),
            env.profile.name,
            board.game.verifier.mode.value,
            env.best_speedup,
            hashlib.sha256(image).hexdigest(),
            tuple(path),
            tuple(env.words(path)),
        )
        env.board.restore(standing)
        return found

    def write(self, path: Path) -> None:
        """Write the file in one step."""
        write_text_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Replay:
        """Read a file; raises `InputError` for anything else."""
        try:
            values = json.loads(path.read_text())
            values["actions"], values["words"] = tuple(values["actions"]), tuple(values["words"])
            found = cls(**values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a replay ({error})") from None
        if found.schema != SCHEMA:
            raise InputError(f"{path}: schema {found.schema}, this version reads {SCHEMA}")
        return found

    def play(self, original: Cubin) -> bytes:
        """The cubin the actions lead to.

        Raises `InputError` for another original, `CheckFailed` when the bits are not the same.
        """
        if hashlib.sha256(original.data).hexdigest() != self.original_sha256:
            raise InputError(f"{original.origin} is not the cubin this replay was made from")
        env = make_env(original, self.kernel, self.profile, self.mode)
        env.follow(list(self.actions))
        image = env.board.candidate().cubin
        found = hashlib.sha256(image).hexdigest()
        if found != self.sha256:
            raise CheckFailed(f"the replay ends with {found[:16]}, it was {self.sha256[:16]}")
        return image


def main(arguments: list[str]) -> int:
    """Replay a learned player's best state; returns the exit status."""
    parser = argparse.ArgumentParser(prog="replay", description="replay a player's best state")
    parser.add_argument("replay", type=Path, help="replay.json")
    parser.add_argument("original", type=Path, help="the cubin as compiled")
    parser.add_argument("-o", "--out", type=Path, required=True, help="where to write the result")
    given = parser.parse_args(arguments)
    try:
        found = Replay.read(given.replay)
        write_bytes_atomically(given.out, found.play(load(given.original)))
    except WarploomError as error:
        print(f"replay: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{given.out}: {found.kernel}, {len(found.actions)} actions, the same bits")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
