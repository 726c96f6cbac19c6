"""What of a job's log 'rayloom submit' shows."""

import re

from app.cluster.job_log import JobLog

WRITTEN = """\
2026-11-25 03:55:22,394\tINFO job_manager.py:581 -- Runtime env is setting up.
Running entrypoint for job lifecycle-839da287: python -m jobs.lifecycle recipes/reviews.yaml train.epochs=2
── train ──
\x1b[36m(RayTrainWorker pid=20456)\x1b[0m epoch 1/2  step 41/434  loss 0.7840  204 samples/s  1:53 left
\x1b[36m(RayTrainWorker pid=20450)\x1b[0m warning: the disk is nearly full
\x1b[36m(RayTrainWorker pid=20456, ip=10.0.0.7)\x1b[0m epoch 1/2  step 79/434  loss 0.4920  243 samples/s  1:38 left
\x1b[36m(ServeController pid=23472)\x1b[0m INFO 2026-11-25 04:01:27,457 serve 23472 -- Throughput optimized
\x1b[36m(ServeController pid=23472)\x1b[0m   • Direct ingress enabled
\x1b[36m(ServeController pid=23472)\x1b[0m\x20
\x1b[36m(ServeController pid=23472)\x1b[0m WARNING 2026-11-25 04:01:28,457 serve 23472 -- a replica is ill
INFO 2026-11-25 04:01:30,916 serve 18073 -- Started Serve in namespace "serve".
\x1b[36m(ServeReplica:rayloom:ModelServer pid=23612)\x1b[0m I1125 04:01:33.696779   23672 fork_posix.cc:71] Other
\x1b[36m(TrainController pid=11804)\x1b[0m /x/site-packages/ray/data/options.py:436: RayDeprecationWarning: `it` is old
\x1b[36m(TrainController pid=11804)\x1b[0m   self.it = it
\x1b[36m(trials of a-b-c pid=11219)\x1b[0m Exception ignored in: <function WeakSet.__init__.<locals>._remove at 0x7f>
\x1b[36m(trials of a-b-c pid=11219)\x1b[0m Traceback (most recent call last):
RESULT {"job":"train","status":"succeeded"}
\x1b[36m(trials of a-b-c pid=11219)\x1b[0m SystemExit: 1
"""
SHOWN = """\
── train ──
epoch 1/2  step 41/434  loss 0.7840  204 samples/s  1:53 left
(RayTrainWorker pid=20450) warning: the disk is nearly full
epoch 1/2  step 79/434  loss 0.4920  243 samples/s  1:38 left
(ServeController pid=23472) WARNING 2026-11-25 04:01:28,457 serve 23472 -- a replica is ill
RESULT {"job":"train","status":"succeeded"}
"""


def test_rayloom_s_lines_are_shown_plain_and_ray_s_own_are_left_out() -> None:
    log = JobLog()
    assert "\n".join([*log.lines(WRITTEN), *log.end(), ""]) == SHOWN
    assert log.has_result


def test_it_does_not_matter_where_the_log_is_cut() -> None:
    for size in (1, 7, 100):
        log, shown = JobLog(), list[str]()
        for first in range(0, len(WRITTEN), size):
            shown += log.lines(WRITTEN[first : first + size])
        assert "\n".join([*shown, *log.end(), ""]) == SHOWN


def test_a_traceback_that_is_not_of_ray_s_end_of_a_process_is_shown() -> None:
    process = "(trials of a-b-c pid=7) "
    text = "".join(f"{process}{line}\n" for line in ("Exception ignored in: <function f>", "ValueError: broken"))
    log = JobLog()
    assert "\n".join([*log.lines(text), *log.end(), ""]) == text
    many = text + "".join(f"{process}{number}\n" for number in range(30))
    assert "\n".join([*JobLog().lines(many), ""]) == many


def test_a_verbose_log_has_every_line_once_wherever_it_is_cut() -> None:
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in WRITTEN.splitlines()]
    for size in (1, 7, 100):
        log = JobLog(shows_all=True)
        shown = [line for first in range(0, len(WRITTEN), size) for line in log.lines(WRITTEN[first : first + size])]
        assert [*shown, *log.end()] == lines
    assert log.has_result
    unfinished = JobLog(shows_all=True)
    assert [*unfinished.lines("one\ntwo"), *unfinished.end()] == ["one", "two"]


def test_a_last_line_without_its_end_is_shown() -> None:
    log = JobLog()
    assert list(log.lines("one\ntwo")) == ["one"]
    assert list(log.end()) == ["two"]
    assert not log.has_result


def test_only_a_result_of_a_job_counts_as_one() -> None:
    log = JobLog()
    assert list(log.lines("RESULT of my own: 3\n")) == ["RESULT of my own: 3"]
    assert not log.has_result
