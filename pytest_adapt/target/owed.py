"""What an answer must bring: a target does not choose how much of it is judged.

Every row from the first one that was asked for, every observable that was asked for and that a probe saw, as many
tokens and candidates as were asked for; or less only where `Info` or the request says so.
"""

from __future__ import annotations

import math

from pytest_adapt.target.protocol import Info, Request, Response

__all__ = ["shortfall"]


def shortfall(request: Request, response: Response, info: Info, context: int, may_end: bool = False) -> str:
    """What ``response`` lacks, in one line; empty where it is whole, or a refusal.

    ``context``: tokens of prompt and output that the deployment has room for, at which an output may end. ``may_end``:
    it was asked to be aborted, and may have no rows and fewer tokens.
    """
    if response.error is not None:
        return ""
    if response.prompt_tokens != len(request.prompt):
        return f"the target counted {response.prompt_tokens} prompt tokens, {len(request.prompt)} were sent"
    outside = [token for token in response.tokens if not 0 <= token < (info.vocab_size or token + 1)]
    if outside:
        return f"generated token {outside[0]} is outside the vocabulary of {info.vocab_size or 'any model'}"
    if may_end and response.finish == "abort":
        return ""
    return _rows(request, response, info) or _length(request, response, context) or _accounts(request, response)


def _accounts(request: Request, response: Response) -> str:
    """What an answer says of its own end and time must fit the rest of it."""
    last = response.tokens[-1:]
    if response.finish == "stop" and request.ignore_eos and last and last[0] not in request.stop:
        return f"finish 'stop' after token {last[0]}, which is no stop token, and the end token is to be ignored"
    for name in ("seconds", "first_token_seconds"):
        value = getattr(response, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            return f"{name} is {value:g}, which is no time that an answer can have taken"
    first = response.first_token_seconds
    if first is not None and response.seconds is not None and first > response.seconds:
        return f"the first token came after {first:g} s, and the whole answer after {response.seconds:g} s"
    return ""


def _rows(request: Request, response: Response, info: Info) -> str:
    shown = {"logits": response.logits, "score": response.scores, "topk": response.topk, "taps": response.taps or None}
    present = [name for name, value in shown.items() if value is not None]
    absent = [name for name in sorted(request.want & shown.keys()) if name not in present]
    if absent:
        return f"{absent[0]} was asked for, a probe saw it, and it is absent from the answer"
    first = len(request.prompt) - 1 if info.first_row < 0 else info.first_row
    if present and response.first_row > max(request.first_row, first):
        return (
            f"rows begin at token {response.first_row}, and were asked for from token {request.first_row} "
            f"(a target that cannot show the first ones says so: Info.first_row)"
        )
    if response.topk is not None and "topk" in request.want:
        width = response.topk.ids.shape[1]
        least = min(n for n in (request.topk, info.topk, info.vocab_size) if n > 0)
        if width < least:
            return f"topk lists {width} candidates, {least} were asked for (a limit of the target is Info.topk)"
    return ""


def _length(request: Request, response: Response, context: int) -> str:
    count = len(response.tokens) if response.completion_tokens is None else response.completion_tokens
    if not count:
        if response.text and response.completion_tokens is None:
            return ""  # shows text alone and does not count it: nobody can tell
        listed = None if response.topk is None else response.topk.ids
        arrays = [array for array in (response.logits, response.scores, listed) if array is not None]
        # Row i is what follows token i, and the last token was never fed.
        count = max([0, *(response.first_row + len(array) - len(request.prompt) + 1 for array in arrays)])
    if count >= request.max_new_tokens:
        return ""
    if response.finish == "stop" and (
        not request.ignore_eos or response.tokens[-1:] in [(one,) for one in request.stop]
    ):
        return ""
    if len(request.prompt) + count >= context:
        return ""
    return (
        f"{count} of {request.max_new_tokens} tokens were generated, finish {response.finish!r}: fewer are right only "
        "after a stop token, after the end token where it is not to be ignored, or at the end of the context"
    )
