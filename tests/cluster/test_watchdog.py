"""Who is lost or hangs is named and ends the run; a stop is agreed on. Real processes, without jax between them."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from amsp_jax.errors import UserError
from amsp_jax.runtime.watchdog.coordinator import Hub
from amsp_jax.runtime.watchdog.members import AwakeClock, Limits, Member, Status, hang, hello
from amsp_jax.runtime.watchdog.messages import Line, encode, listen
from amsp_jax.runtime.watchdog.watch import Watch

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE_S = 120


# Who hangs, by what is known of each


def members(*statuses):
    return [
        Member(index, f"n{index}", status=Status(stage=stage, step=step, age_s=age_s, limit_s=limit_s))
        for index, (stage, step, age_s, limit_s) in enumerate(statuses)
    ]


TRAINS = ("training", 8, 25.0, 20.0)


@pytest.mark.parametrize(
    ("statuses", "line"),
    [
        ([TRAINS[:2] + (5.0, 20.0)] * 2, None),
        ([TRAINS[:2] + (500.0, None)] * 2, None),
        (
            [TRAINS, ("training", 7, 26.0, 20.0), TRAINS],
            "process 1 on n1 hangs: training at step 7 for 26 s, limit 20 s; the others are training at step 8.",
        ),
        (
            [TRAINS, ("training", 7, 26.0, 20.0), ("training", 7, 26.0, 20.0)],
            "processes 1, 2 on n1, n2 hang: training at step 7 for 26 s, limit 20 s; the others are training at step "
            "8.",
        ),
        # Waited for as long as it likes, or until its own limit.
        ([TRAINS, ("saving", 7, 100.0, None), TRAINS], None),
        ([TRAINS, ("saving", 7, 100.0, 200.0), TRAINS], None),
        (
            [TRAINS, ("validating", 8, 21.0, 20.0), TRAINS],
            "process 1 on n1 hangs: validating at step 8 for 21 s, limit 20 s; the others are training at step 8.",
        ),
        (
            [("validating", 8, 25.0, 20.0), ("training", 8, 26.0, 20.0)],
            "process 1 on n1 hangs: training at step 8 for 26 s, limit 20 s; the others are validating at step 8.",
        ),
        (
            [("running the first collective", None, 61.0, 60.0), ("starting the devices", None, 62.0, 50.0)],
            "process 1 on n1 hangs: starting the devices for 62 s, limit 50 s; the others are running the first "
            "collective.",
        ),
        (
            [TRAINS, TRAINS],
            "all 2 processes hang: training at step 8 for 25 s, limit 20 s. A device or the network between the nodes "
            "hangs.",
        ),
        # The other is not late yet.
        ([TRAINS, ("training", 8, 19.0, 20.0)], None),
        ([TRAINS], "process 0 on n0 hangs: training at step 8 for 25 s, limit 20 s."),
    ],
)
def test_who_hangs(statuses, line):
    assert hang(members(*statuses)) == line


def test_status_travels():
    status = Status(stage="training", step=3, age_s=1.5, limit_s=20.0)
    assert Status.of(json.loads(json.dumps(status.message()))) == status


def test_a_suspended_process_is_not_late():
    clock = AwakeClock(longest_step_s=0.05)
    time.sleep(0.3)
    clock.advance()
    assert clock.now == 0.05


def test_the_limit_of_a_step_follows_the_last_ones():
    watch = Watch(Limits(step_at_least_s=0.1, step_factor=5.0, first_step_s=7.0))
    watch._count = 2
    watch.step(1)
    assert watch._stage.limit_s == 7.0
    time.sleep(0.05)
    watch.doing("validating", 3.0)
    assert watch._stage.limit_s == 3.0 and watch._stage.step == 1
    watch.step(2)
    assert watch._stage.limit_s >= 5 * 0.05
    watch.step(3, limit_s=9.0)
    assert watch._stage.limit_s == 9.0


def test_a_lone_process_hangs_only_where_a_limit_was_asked_for():
    watch = Watch()
    watch.step(1)
    assert watch._stage.limit_s is None
    watch.doing("validating", 3.0)
    assert watch._stage.limit_s is None
    watch.step(2, limit_s=9.0)
    assert watch._stage.limit_s == 9.0


def test_a_watch_that_is_out_of_reach_is_an_error():
    with listen(0) as listener:
        address = ("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(UserError, match="process 1 on b cannot reach process 0 on a at port .* refused"):
        Watch().follow(1, ["a", "b"], address, "key")


# What process 0 decides, without sockets


def make_hub(count=3):
    told = []
    clock = AwakeClock(1.0)
    hub = Hub([f"n{i}" for i in range(count)], Limits(), clock, told.append)
    return hub, clock, told


def test_all_stop_after_the_farthest_boundary():
    hub, _, told = make_hub()
    first, second, third = hub._members
    hub._hear(second, {"kind": "signal", "signal": "SIGTERM"})
    hub._hear(third, {"kind": "signal", "signal": "SIGTERM"})
    assert told == [{"kind": "stop", "signal": "SIGTERM"}]
    for member, boundaries in ((first, 4), (third, 6), (second, 5)):
        answer = {"kind": "passed", "boundaries": boundaries, "stage": "training", "nothing": None}
        assert len(told) == 1
        hub._hear(member, answer)
    assert told[1:] == [{"kind": "stop_at", "boundary": 7}]


def test_nothing_to_save_in_one_process_ends_all():
    hub, _, told = make_hub()
    hub.post({"kind": "signal", "signal": "SIGUSR1"})
    hub._hear(hub._members[1], {"kind": "passed", "boundaries": 0, "stage": "compiling", "nothing": "nothing to save"})
    assert told[-1]["code"] == 85
    assert told[-1]["line"] == "asked to stop (SIGUSR1, process 0 on n0) while compiling: nothing to save"


def test_a_process_that_does_not_come_is_named():
    hub, clock, told = make_hub()
    for member in hub._members[:2]:
        member.has_joined = True
    clock.now = 61.0
    hub._members[1].heard_at = 60.0
    hub.beat(Status().message())
    assert "process 2 on n2 did not connect to process 0 within 60 s" in told[-1]["line"]


def connection():
    with listen(0) as listener:
        theirs = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
        return listener.accept()[0], theirs


def test_strangers_are_turned_away():
    hub, _, told = make_hub(2)
    ours, theirs = connection()
    line = Line(ours)
    for stranger in (hello(1, "wrong"), hello(0, "key"), hello(2, "key"), {"kind": "status"}):
        with pytest.raises(ValueError, match="stranger"):
            hub._greet(line, stranger, "key")
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError):
        line.receive()
    hub._greet(line, hello(1, "key"), "key")
    assert hub._members[1].has_joined and not told
    ours.close()
    theirs.close()


def test_what_was_sent_before_a_closing_is_read():
    ours, theirs = connection()
    line = Line(ours)
    theirs.sendall(encode({"kind": "bye"}) + b'{"half')
    theirs.close()
    assert line.receive() == [{"kind": "bye"}] and line.is_closed
    line.send(b"to nobody")
    line.close()


# Real processes

CHILD = """
import os, signal, socket, sys, time, types
# Their __init__ would import jax, which takes seconds and is not needed here.
for name in ("amsp_jax", "amsp_jax.runtime.launch"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join(os.environ["PYTHONPATH"], *name.split("."))]
from amsp_jax.runtime.watchdog import watch as module
from amsp_jax.runtime.watchdog.members import Limits
from amsp_jax.runtime.launch.processes import end_all_on_error, end_process
index, count, port, listener = map(int, sys.argv[1:])
limits = dict(heartbeat_s=0.2, silence_s=SILENCE_S, step_at_least_s=1.0, leave_s=2.0)
watch = module._OWN = module.Watch(Limits(**limits))
end_all_on_error(count)
hosts = [f"n{i}" for i in range(count)]

def join():
    if count > 1 and index == 0:
        watch.lead(hosts, socket.socket(fileno=listener), "key")
    elif count > 1:
        watch.follow(index, hosts, ("127.0.0.1", port), "key")

def train(first=1, last=10**6, until=lambda number: False):
    watch.can_save()
    for number in range(first, last):
        if watch.stops_here():
            print("stopped", number - 1, watch.stop_signal, flush=True)
            watch.doing("saving")
            end_process(85)
        watch.step(number)
        if number == first + 3:
            print("ready", flush=True)
        time.sleep(0.02)
        if until(number):
            return

def wait(what="waiting in XLA"):
    print("ready", flush=True)
    time.sleep(1000)

"""


class Children:
    """Processes that watch one another; `ready` waits until each has said so."""

    def __init__(self, code, count, silence_s=60.0):
        source = CHILD.replace("SILENCE_S", str(silence_s)) + textwrap.dedent(code)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        with listen(0) as listener:
            arguments = [str(count), str(listener.getsockname()[1]), str(listener.fileno())]
            self.all = [
                subprocess.Popen(
                    [sys.executable, "-c", source, str(index), *arguments],
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    pass_fds=[listener.fileno()],
                )
                for index in range(count)
            ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in self.all:
            child.kill()
            child.communicate()

    def ready(self):
        for child in self.all:
            assert child.stdout.readline() == "ready\n", child.communicate()[1]
        # Two heartbeats, so that process 0 knows what each does.
        time.sleep(0.5)
        return self

    def results(self):
        """The exit code and the last lines of stdout and stderr of each."""
        texts = [child.communicate(timeout=PATIENCE_S) for child in self.all]
        return [
            (child.returncode, (out.splitlines() or [""])[-1], (err.splitlines() or [""])[-1])
            for child, (out, err) in zip(self.all, texts, strict=True)
        ]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_by_the_others(victim):
    with Children("join(); train()", 3) as children:
        children.ready().all[victim].kill()
        results = children.results()
    assert results.pop(victim)[0] == -signal.SIGKILL
    for code, _, err in results:
        assert code == 86
        assert err.startswith(f"process {victim} on n{victim} is lost: its connection closed"), err
        assert "Its last report: training at step " in err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named_and_ends_once_it_goes_on(victim):
    with Children("join(); wait()", 2, silence_s=3.0) as children:
        children.ready().all[victim].send_signal(signal.SIGSTOP)
        other = children.all[1 - victim]
        _, err = other.communicate(timeout=PATIENCE_S)
        assert other.returncode == 86
        assert f"process {victim} on n{victim} is lost: nothing was heard of it for" in err
        children.all[victim].send_signal(signal.SIGCONT)
        assert children.all[victim].wait(PATIENCE_S) == 86


@pytest.mark.slow
def test_a_job_that_is_suspended_as_a_whole_goes_on():
    code = """
        join()
        watch.step(1, limit_s=3.0)
        wait()
    """
    with Children(code, 2, silence_s=3.0) as children:
        children.ready()
        for name in (signal.SIGSTOP, signal.SIGCONT):
            for child in children.all:
                child.send_signal(name)
            time.sleep(5.0 if name == signal.SIGSTOP else 1.0)
        assert [child.poll() for child in children.all] == [None, None]


def test_the_last_words_of_a_process_are_heard_by_the_others():
    code = """
        join()
        train(until=lambda number: number == 20 and index == 1)
        raise ValueError("broken on purpose")
    """
    with Children(code, 3) as children:
        results = children.ready().results()
    code, _, err = results.pop(1)
    assert (code, err) == (1, "ValueError: broken on purpose")
    line = "process 1 on n1 failed: ValueError: broken on purpose (training at step"
    assert all(code == 86 and err.startswith(line) for code, _, err in results), results


def test_process_0_has_last_words_too():
    with Children("join(); print('ready', flush=True); index or (time.sleep(2), 1 / 0); train()", 2) as children:
        first, second = children.ready().results()
    assert first[0] == 1
    assert second[0] == 86 and "process 0 on n0 failed: ZeroDivisionError: division by zero" in second[2]


def test_a_process_that_hangs_is_named_and_ends_with_the_others():
    # The others wait in the collective of the next step.
    code = """
        join()
        train(until=lambda number: number == (7 if index == 1 else 8))
        time.sleep(1000)
    """
    with Children(code, 3) as children:
        results = children.ready().results()
    for code, _, err in results:
        assert code == 86
        assert err.startswith("process 1 on n1 hangs: training at step 7 for "), err
        assert "the others are training at step 8" in err


def test_processes_that_end_in_good_order_are_not_lost():
    code = """
        import atexit
        join()
        atexit.register(watch.leave, 0)
        train(last=10)
        time.sleep(0.5 * index)
    """
    with Children(code, 3) as children:
        results = children.ready().results()
    assert [(code, err) for code, _, err in results] == [(0, "")] * 3


def test_a_process_that_ends_while_the_others_train_is_named():
    with Children("join(); train(until=lambda n: n == 5 and index == 1); watch.leave(0); wait()", 2) as children:
        results = children.ready().results()
    for code, _, err in results:
        assert code == 86
        assert err.startswith("process 1 on n1 ended with exit code 0 while process 0 on n0 was still training"), err


@pytest.mark.slow
def test_a_mistake_that_one_process_finds_ends_all_with_its_code():
    code = "join(); print('ready', flush=True); index == 1 and (time.sleep(2), end_process(2)); train()"
    with Children(code, 2) as children:
        first, second = children.ready().results()
    assert (first[0], second[0]) == (2, 2)
    assert first[2].startswith("process 1 on n1 ended with exit code 2 while ")


def test_process_0_may_hear_the_end_while_it_leaves():
    """The other's goodbye is read between the first and the second half of its own."""
    leaving = "index == 0 and (setattr(watch, '_is_leaving', True), time.sleep(1)); index == 1 and time.sleep(0.3)"
    with Children(f"join(); print('ready', flush=True); time.sleep(1); {leaving}; end_process(85)", 2) as children:
        first, second = children.ready().results()
    assert (first[0], second[0]) == (85, 85), (first, second)


# Asked to stop


@pytest.mark.parametrize("asked", [[0], [1], [0, 1, 2]])
def test_all_processes_stop_at_one_step(asked):
    code = """
        with watch.catch_signals():
            join()
            train()
    """
    with Children(code, 3) as children:
        children.ready()
        for _ in range(3):
            for index in asked:
                if children.all[index].poll() is None:
                    children.all[index].send_signal(signal.SIGTERM)
        results = children.results()
    assert [code for code, _, _ in results] == [85] * 3, results
    assert results[0][1].startswith("stopped ") and results[0][1].endswith(" SIGTERM")
    assert len({out for _, out, _ in results}) == 1


def test_a_stop_waits_for_a_process_that_does_something_else():
    code = """
        with watch.catch_signals():
            join()
            train(until=lambda number: number == 10)
            if index == 1:
                watch.doing("validating", None)
                time.sleep(1)
            train(first=11)
    """
    with Children(code, 2) as children:
        children.ready().all[0].send_signal(signal.SIGTERM)
        results = children.results()
    assert [code for code, _, _ in results] == [85, 85], results
    assert len({out for _, out, _ in results}) == 1


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_with_nothing_to_save_ends_all_at_once(asked):
    code = """
        with watch.catch_signals():
            join()
            watch.doing("compiling")
            watch.nothing_to_save("the last checkpoint is runs/1/checkpoints/100")
            wait()
    """
    with Children(code, 2) as children:
        children.ready().all[asked].send_signal(signal.SIGTERM)
        first, second = children.results()
    assert (first[0], second[0]) == (85, 85)
    line = f"asked to stop (SIGTERM, process {asked} on n{asked}) while compiling: "
    assert (first[2], second[2]) == (f"{line}the last checkpoint is runs/1/checkpoints/100", "")


LONE = """
    with watch.catch_signals():
        watch.doing("compiling")
        print("ready", flush=True)
        # Inside C without an end, where Python's own handlers do not run.
        import threading
        lock = threading.Lock()
        lock.acquire()
        import hashlib
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_lone_process_inside_c_stops_at_once(name):
    with Children(LONE, 1) as children:
        children.ready().all[0].send_signal(getattr(signal, name))
        ((code, _, err),) = children.results()
    assert (code, err) == (85, f"asked to stop ({name}) while compiling: nothing to save")


def test_a_lone_process_stops_at_the_next_boundary():
    with Children("with watch.catch_signals(): train()", 1) as children:
        children.ready().all[0].send_signal(signal.SIGTERM)
        ((code, out, err),) = children.results()
    assert (
        code == 85 and out.startswith("stopped ") and err.startswith("asked to stop (SIGTERM) while training at step")
    )


def test_the_second_interrupt_does_not_wait():
    with Children("with watch.catch_signals():\n    watch.can_save(); wait()", 1) as children:
        child = children.ready().all[0]
        child.send_signal(signal.SIGINT)
        time.sleep(0.5)
        child.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        ((code, _, err),) = children.results()
    assert (code, err) == (130, "interrupted twice: ended without saving")


def test_a_signal_is_ignored_once_it_has_been_obeyed():
    code = """
    with watch.catch_signals():
        watch.can_save()
        print("ready", flush=True)
        while not watch.stops_here():
            time.sleep(0.02)
    print("left", flush=True)
    time.sleep(0.5)
    end_process(85)
    """
    with Children(code, 1) as children:
        (child,) = children.ready().all
        child.send_signal(signal.SIGUSR1)
        assert child.stdout.readline() == "left\n"
        child.send_signal(signal.SIGUSR1)
        ((exit_code, _, _),) = children.results()
    assert exit_code == 85


def test_handlers_of_before_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with Watch().catch_signals():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1
