"""The executor: jobs give the same results in this process, in several and on Ray; workers may die."""

import os
import pickle
import signal
import sys
from dataclasses import replace

import pytest

import bertkit
from bertkit.errors import UsageError
from bertkit.system.cluster import list_gpus, read_workers
from bertkit.system.disk import Disk
from bertkit.system.parallel import Lost, Work, do_on_ray, execute
from tests.system.jobs import Sum, add_up, die_at_one, end_at_once, fail, stop

WORKERS = [1, 2, pytest.param(0, marks=pytest.mark.slow)]  # this process, several, Ray


class Record:
    """The handled messages by job."""

    def __init__(self):
        self.news = {}

    def __call__(self, number, news):
        self.news.setdefault(number, []).append(news)


@pytest.fixture(autouse=True)
def _leave_ray():
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.parametrize("workers", WORKERS)
def test_messages_come_in_order(workers):
    jobs = [Sum((1, 2)), Sum((3, 4), "ten"), Sum(()), Sum((5,), "one"), Sum((6,), "ten")]
    record = Record()
    assert execute(Work(add_up), jobs, {"ten": 10, "one": 1}, record, workers) == 0
    assert record.news == {0: [1, 3], 1: [13, 17], 3: [6], 4: [16]}


@pytest.mark.parametrize("workers", WORKERS)
def test_a_users_mistake_in_a_job_is_raised_here(workers):
    with pytest.raises(UsageError, match=r"^one is wrong; give two$"):
        execute(Work(fail), [Sum((1,)), Sum((1,))], {}, Record(), workers)


def test_another_error_in_a_worker_comes_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)^a worker failed:.*in fail\n.*KeyError: 'two'"):
        execute(Work(fail), [Sum((2,)), Sum((2,))], {}, Record(), 2)


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_a_job_that_has_lost_its_worker_starts_again_from_what_became_of_it(workers):
    jobs, record = [Sum((5, 1)), Sum((7,))], Record()

    def handle(number, news):
        record(number, news)
        if isinstance(news, Lost):
            jobs[number] = replace(jobs[number], numbers=(5,))

    assert execute(Work(die_at_one), jobs, {}, handle, workers) == 0
    begun, lost, again, result = record.news[0]
    assert (begun, again, result) == ("begun", "begun", 5)
    assert lost.cause.startswith("its process died (exit code -9)" if workers else "its worker was lost")
    assert not lost.is_final
    assert record.news[1] == ["begun", 7]


@pytest.mark.parametrize("workers", WORKERS[1:])
def test_a_job_of_which_workers_die_again_and_again_is_given_up(workers):
    record = Record()
    assert execute(Work(die_at_one), [Sum((1,)), Sum((7,))], {}, record, workers) == 0
    assert [news.is_final for news in record.news[0] if isinstance(news, Lost)] == [False, False, True]
    assert record.news[1] == ["begun", 7]


def test_a_worker_with_another_version_is_refused():
    disk = Disk(os.getcwd())
    done = do_on_ray(0, Sum((1,)), Work(add_up), pickle.dumps(None), None, disk, "0.0")
    with pytest.raises(UsageError, match=rf"^\S+ has bertkit {bertkit.__version__}, expected 0.0 as on this machine; "):
        done.check()


def test_a_job_that_a_signal_stops_ends_the_work():
    assert execute(Work(stop), [Sum(()), Sum(())], {}, Record(), 1) == signal.SIGTERM


@pytest.mark.parametrize("held", [[0], [0, 1]])
def test_a_signal_ends_the_workers(held):
    """The signal arrives while these jobs report; they end, whatever they did, and no other one begins."""
    jobs, record = [Sum(tuple(range(2_000))), Sum(tuple(range(2_000))), Sum((1,))], Record()

    def handle(number, news):
        record(number, news)
        if number in held and len(record.news[number]) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    assert execute(Work(add_up), jobs, {}, handle, 2) == signal.SIGTERM
    assert 2 not in record.news


def test_workers_that_cannot_begin_are_given_up():
    with pytest.raises(UsageError, match=r"processes exit before they start work \(exit code 1\); use --workers 1"):
        execute(Work(add_up, begin=end_at_once), [Sum(()), Sum(())], {}, Record(), 2)


@pytest.mark.parametrize(("text", "count"), [(1, 1), ("3", 3), ("ray", 0)])
def test_the_number_of_workers_is_read(text, count):
    assert read_workers(text) == count


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_other_numbers_of_workers_are_refused(text):
    with pytest.raises(UsageError, match=f"--workers is {text!r}; give a whole number above 0, or ray"):
        read_workers(text)


def test_several_workers_inside_of_processes_that_share_a_run_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert read_workers(1) == 1
    for text in ("2", "ray"):
        with pytest.raises(UsageError, match=f"--workers {text} inside 4 processes that share each run; omit"):
            read_workers(text)


def test_ray_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as error:
        read_workers("ray")
    assert str(error.value) == "Ray is not installed; run pip install -e '.[ray]' in the checkout of bertkit"


def test_every_gpu_that_may_be_used_is_listed(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8932")
    assert list_gpus() == ["3", "GPU-8932"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list_gpus() == []
