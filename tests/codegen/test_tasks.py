"""The walk over tasks: the emitted arithmetic gives every position once, in every order."""

import itertools
import re
from dataclasses import replace

import pytest

from warploom.autosched.schedules import Policy, compiled, schedule_for
from warploom.codegen.compile.build import build
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.simt import frame
from warploom.codegen.cuda.tasks import task_lines
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.oracle.barriers import TaskRing
from warploom.codegen.oracle.simulate import simulate
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed, InputError
from warploom.kernels.attention.combine import combine, combine_schedule
from warploom.kernels.attention.decode import DecodeConfig, decode, decode_policy
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode_all
from warploom.sass.rules.lint import lint
from warploom.tile import E4M3, interpret

from .programs import attention_case


def walk(program, plan, sizes, blocks):
    """Positions a block takes, for each block: the emitted head run as Python."""
    head, _ = task_lines(program, plan)
    cluster = plan.cluster[1]
    names = [name for name, _ in program.grid]
    cut = next(i for i, line in enumerate(head) if line.startswith("for ("))
    body = [line for line in head[cut + 1 :] if "barrier" not in line and "shared_" not in line]
    body = [line for line in body if "advance" not in line and "take_task" not in line]
    result, counter = [], itertools.count()
    for block in range(blocks):
        scope = {c_name(k): v for k, v in sizes.items()} | {"min": min, "max": max}
        scope |= {"block": block, "blocks": blocks, "rank": block % cluster}
        mine = []
        run(head[:cut], scope)
        if plan.tile_scheduler == "dynamic":
            scope["task"] = block
            while scope["task"] < scope["tasks"]:
                run([line for line in body if "break" not in line], scope)
                mine.append(tuple(scope[c_name(n)] for n in names))
                scope["task"] = blocks + next(counter)
        elif plan.tile_scheduler == "serpentine":
            for turn in itertools.count():
                scope["round"] = turn
                if turn * scope["stride"] >= scope["tasks"]:
                    break
                run([body[0]], scope)
                if scope["task"] < scope["tasks"]:
                    run(body[2:], scope)
                    mine.append(tuple(scope[c_name(n)] for n in names))
        else:
            for task in range(block // cluster, scope["tasks"], blocks // cluster):
                scope["task"] = task
                run(body, scope)
                mine.append(tuple(scope[c_name(n)] for n in names))
        result.append(mine)
    return result


def run(lines, scope):
    for line in lines:
        text = line.strip().rstrip(";").replace("::", "").replace("blockIdx.x", "block")
        text = text.replace("gridDim.x", "blocks").replace("static_cast<int>", "")
        if not text or text.startswith("#") or text.startswith("Cursor"):
            continue
        text = re.sub(r"^(const )?int ", "", text).replace("/=", "//=")
        text = re.sub(r"(?<!/)/(?![/=])", "//", text)
        if choice := re.match(r"(.*)\((.*) \? (.*) : (.*)\)$", text):
            head, test, yes, no = choice.groups()
            text = f"{head}(({yes}) if ({test}) else ({no}))"
        for part in text.split(", ") if text.startswith("first") else [text]:
            exec(part, scope)


GEMM_SIZES = {"m": 900, "n": 1300, "k": 64, "batch": 3}
PLANS = {
    "rows": LaunchPlan(split="m"),
    "bands": LaunchPlan(split="m", supergroup=3),
    "pairs": LaunchPlan(split="m", supergroup=2, cluster=("m_tile", 2)),
    "pairs along n": LaunchPlan(split="m", supergroup=2, cluster=("n_tile", 2)),
    "serpentine": LaunchPlan(split="m", supergroup=3, tile_scheduler="serpentine"),
    "serpentine pairs": LaunchPlan(
        split="m", supergroup=3, tile_scheduler="serpentine", cluster=("m_tile", 2)
    ),
    "dynamic": LaunchPlan(split="m", tile_scheduler="dynamic", reverse=("n_tile",)),
    "flat bands": LaunchPlan(split="m", supergroup=5, grouped="all", tile_scheduler="serpentine"),
}


@pytest.mark.parametrize("blocks", [2, 8, 64])
@pytest.mark.parametrize("name", PLANS)
def test_every_position_is_taken_exactly_once(name, blocks):
    program = gemm(GemmConfig(batched=True))
    taken = [x for mine in walk(program, PLANS[name], GEMM_SIZES, blocks) for x in mine]
    wanted = set(itertools.product(range(3), range(8), range(6)))
    assert len(taken) == len(set(taken)) and set(taken) == wanted


def makespan(plan, n, heads):
    """Longest over mean work of 132 blocks, a task's work being its key blocks and one."""
    program = attention(AttentionConfig(causal=True))
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "rows": n, "keys": n, "d": 128}
    loads = [sum(row + 2 for _, _, row in mine) for mine in walk(program, plan, sizes, 132)]
    return max(loads) / (sum(loads) / len(loads))


def test_longest_first_over_all_heads_in_a_serpentine_balances_causal_attention():
    plan = LaunchPlan(split="rows", reverse=("rows_tile",))
    serpentine = plan.with_options(supergroup=10**6, grouped="all", tile_scheduler="serpentine")
    for n, heads in ((1536, 160), (16384, 16)):
        assert makespan(plan, n, heads) > 1.15 and makespan(serpentine, n, heads) < 1.03


@pytest.mark.parametrize("seed", range(4))
def test_tasks_handed_over_are_the_same_work(seed):
    program, schedule, arrays = attention_case(200, 200, causal=True)
    plan = schedule.launch.with_options(tile_scheduler="dynamic", reverse=("rows_tile",))
    kernel = lower(program, type(schedule)(schedule.name, schedule.loops, plan, schedule.pingpong))
    got, want = simulate(kernel, arrays, seed=seed), interpret(program, arrays)
    assert got["o"].tobytes() == want["o"].tobytes()


def test_a_slot_read_by_too_few_is_noticed(monkeypatch):
    program, schedule, arrays = attention_case(200, 200)
    plan = schedule.launch.with_options(tile_scheduler="dynamic")
    kernel = lower(program, type(schedule)(schedule.name, schedule.loops, plan, schedule.pingpong))
    monkeypatch.setattr(
        "warploom.codegen.oracle.simulate.TaskRing",
        lambda name, slots, readers: TaskRing(name, slots, 3),
    )
    with pytest.raises(CheckFailed, match="deadlock"):
        simulate(kernel, arrays)


def test_dynamic_kernels_compile_and_name_their_counter():
    program = attention(AttentionConfig(causal=True))
    launch = LaunchPlan(
        split="rows", tile_scheduler="dynamic", dependent=True, reverse=("rows_tile",)
    )
    schedule = schedule_for(
        program, Policy("pingpong", launch, groups=2, depth=2, registers=(40, 232))
    )
    built = build(program, schedule)
    assert {"kind": "counter"} in built.source.parameters and built.source.dependent
    assert emit(lower(program, schedule)).text.count("take_task(task_counter") == 1


@pytest.mark.parametrize(("once", "fetched"), [(True, 3), (True, 0), (False, 3), (False, 0)])
def test_every_role_waits_for_the_previous_grid_before_it_reads_or_writes(once, fetched):
    config = DecodeConfig(dtype=E4M3, page=16, once=once, tile=(64, 128))  # whose values are turned
    program, policy = decode(config), decode_policy(config)
    policy = replace(policy, launch=policy.launch.with_options(fetch_early=fetched))
    text = emit(lower(program, schedule_for(program, policy))).text
    text = text[text.index("start_next_grid();\n") :]
    before, *roles = re.split(r"// (?:load|compute0): |// turn operands", text)
    assert len(roles) == 3
    access = r"(?<!number_now\()\b\w+_data\b|tma_load"
    assert not re.search(access, before)
    if not (once or fetched):
        assert before.count("wait_previous_grid();") == text.count("wait_previous_grid();") == 1
        return
    for role in roles:
        first, wait = re.search(access, role), role.index("wait_previous_grid();")
        assert wait < first.start() and role.count("wait_previous_grid();") == 1
        assert not once or role.index("_place = rest %") < wait
        assert "tma_fetch" not in role[wait:]
    # L2 is asked by the thread that loads, and numbers are read again for the copies.
    ahead = roles[0][: roles[0].index("wait_previous_grid();")]
    assert ("tma_fetch_4d(&k_map" in ahead) == ("number_now(lengths_data" in ahead) == (fetched > 0)
    assert all("tma_fetch" not in role for role in roles[1:])


def dependent(name):
    """A kernel that begins early: sums of parts, or a product with a vector and a load a lane."""
    if name == "bias":
        program = gemm(GemmConfig(bias=True, activation="gelu"))
        policy = Policy("inflight", LaunchPlan(split="m", dependent=True), groups=2)
        return build(program, schedule_for(program, policy))
    config = DecodeConfig(head_dim=64, group=4, page=16, few=True, once=True)
    if name == "parts":
        return compiled(combine(config, 8), combine_schedule(config, 8))
    return compiled(decode(config), decode_policy(config))


@pytest.mark.parametrize("name", ["parts", "keys", "bias"])
def test_machine_code_loads_nothing_before_the_previous_grid_has_ended(name):
    """Loads of memory that never changes would be moved there, whatever the source says."""
    (kernel,) = decode_all(parse(dependent(name).cubin, name)).values()
    opcodes = [item.line.opcode for item in kernel.instructions]
    loads = [opcode for opcode in opcodes if opcode.startswith("LDG")]
    assert loads and not any("CONSTANT" in opcode for opcode in loads)
    ahead = opcodes[: opcodes.index("ACQBULK")]
    assert all("STRONG" in opcode for opcode in ahead if opcode.startswith("LDG"))


def test_lint_names_a_load_in_front_of_that_wait(monkeypatch):
    """Planted fault: what joins decode's parts, written as if nobody wrote them."""
    (right,) = decode_all(parse(dependent("parts").cubin, "right")).values()
    pointer = frame.pointer_to
    monkeypatch.setattr(frame, "DEPENDENT", {})
    monkeypatch.setattr(frame, "pointer_to", lambda one, written, _: pointer(one, written, False))
    (wrong,) = decode_all(parse(dependent("parts").cubin, "wrong")).values()
    assert not lint(right) and {one.rule for one in lint(wrong)} == {"PREVIOUS_GRID"}


REFUSED = {
    "expected 'static', 'serpentine' or 'dynamic'": {"tile_scheduler": "random"},
    "needs persistent=True": {"tile_scheduler": "serpentine", "persistent": False},
    "use 'serpentine'": {"tile_scheduler": "dynamic", "cluster": ("m_tile", 2)},
    "grouped='plane'": {"grouped": "plane"},
    "fetch_early=2 with dependent=False": {"fetch_early": 2},
}


@pytest.mark.parametrize("message", REFUSED)
def test_plans_that_mean_nothing_are_refused(message):
    with pytest.raises(InputError, match=message):
        LaunchPlan(split="m", **REFUSED[message])
