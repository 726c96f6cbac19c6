"""Print the resident bytes of a trial's actor after each of 20 trials of a wide network. Usage: FOLDER ZERO_STAGE"""

import json
import sys
from typing import Any, ClassVar

import psutil

from app.config import load_recipe
from app.storage import to_path
from app.training.coordination.shared_folder import marked
from app.tuning.trial_actor import TrialActor
from app.tuning.trial_config import LAST_REPORTED_EPOCH, NUMBER, VALUES
from tests.helpers import ROOT

TRIALS = 20
RECIPE = load_recipe(
    ROOT / "recipes/digits.yaml",
    [
        "train.epochs=1",
        "train.max_steps=1",
        "model.factory=tests.faults.models:WideMlp",
        "model.args={width: 2048, pause_s: 0}",
    ],
)


class Actor(TrialActor):
    mark: ClassVar[str]

    def setup(self, config: dict[str, Any]) -> None:  # type: ignore[override]
        super().setup(config, RECIPE.model_dump_json(), sys.argv[1], self.mark)


def main() -> None:
    configs = [
        {NUMBER: number, VALUES: {"train.plan.zero_stage": int(sys.argv[2])}, LAST_REPORTED_EPOCH: 0}
        for number in range(TRIALS + 1)
    ]
    with marked(to_path(sys.argv[1])) as Actor.mark:
        actor, resident = Actor(configs[0]), []
        for config in configs[1:]:
            assert "ended" in actor.step()
            actor.reset_config(config)
            resident.append(psutil.Process().memory_info().rss)
    print(json.dumps(resident))


main()
