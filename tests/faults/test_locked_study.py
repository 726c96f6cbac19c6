"""A study's file that another process holds: waited for, up to a minute."""

from pathlib import Path

import pytest
from sqlalchemy import make_url

from app.errors import StorageError
from tests.studies import ask, create, locked, resume
from tests.tables import Faults


@pytest.mark.parametrize("seconds", [15, 30, 120])
def test_a_study_is_waited_for_up_to_a_minute(seconds: int, tmp_path: Path, faults: Faults) -> None:
    url = make_url(f"sqlite:///{tmp_path / 'study.db'}")
    waits = seconds < 60
    expected = "waited for" if waits else "one clear error after 60 s; goes on, no trial left running"
    with faults("U2", f"the study's file is locked for {seconds} s", expected) as fault:
        study = create(url)
        number = ask(study)
        with locked(url, seconds):
            if waits:
                study.complete(number, [0.5], stopped_early=False)
                fault.saw("the value is in the study")
            else:
                with pytest.raises(StorageError, match=r"locked by another process for 6\d s") as refused:
                    study.complete(number, [0.5], stopped_early=False)
                fault.saw(str(refused.value).partition(" was ")[2].partition(":")[0])
        after = resume(url)
        if not waits:
            assert ask(after) == number  # the trial is tried again
            after.complete(number, [0.5], stopped_early=False)
        assert [trial.value for trial in resume(url).ended] == [0.5]
