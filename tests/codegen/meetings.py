"""The text of a block program whose groups meet, for tests that damage it."""

import re


def steps_of(text: str, role: str) -> list[str]:
    """The steps of a role's steady iteration, without the numbers of their ops."""
    steady = text.split(f"role {role}")[1].split("steady\n")[1].split("straight", maxsplit=1)[0]
    return [line.split(":")[0].split(".")[0].strip() for line in steady.strip().splitlines()]


def without_meeting(text: str, number: int) -> str:
    """The text without the meeting of that number in the loop of each group."""
    head, *roles = re.split(r"(?=  role compute)", text)
    cut = []
    for role in roles:
        found = list(re.finditer(r" +Meet \S+\n", role))[number]
        cut.append(role[: found.start()] + role[found.end() :])
    return head + "".join(cut)
