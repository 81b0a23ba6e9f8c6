"""A complete target in about 50 lines: any engine that gives logits, here plain transformers.

pytest --adapt-target=py:adapter:Target        (in the folder of this file)
"""

from pytest_adapt.target.protocol import Info, Response, UnsupportedDeployment


class Target:
    # An endpoint need not show what happens inside; "aligned": its kernels want widths that are multiples of 128.
    defaults = {"kind": "endpoint", "precisions": ["fp32", "bf16"], "shape_classes": ["aligned", "real"]}

    def open(self, deployment):
        if deployment.layout != "single":
            raise UnsupportedDeployment("this engine runs on one rank")
        import torch
        import transformers

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[deployment.precision]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(deployment.model, dtype=dtype).eval()
        self.torch, self.limit, self.vocab = torch, deployment.max_context, self.model.config.vocab_size
        shown = frozenset({"logits", "text"})
        return Info("my-engine", transformers.__version__, "endpoint", observables=shown, vocab_size=self.vocab)

    def run(self, requests):
        for request in requests:
            total = len(request.prompt) + request.max_new_tokens
            if not request.prompt or total > self.limit or not all(0 <= t < self.vocab for t in request.prompt):
                yield Response(request.id, len(request.prompt), error="the prompt is empty, too long or no tokens")
            else:
                with self.torch.inference_mode():
                    yield self.answer(request)

    def answer(self, request):
        ends = {*request.stop, *(() if request.ignore_eos else [self.model.config.eos_token_id])}
        random = self.torch.Generator().manual_seed(request.sampling.seed)
        tokens, new = list(request.prompt), []
        logits = self.model(self.torch.tensor([tokens])).logits[0].float()  # row i: what follows token i
        while len(new) < request.max_new_tokens and not ends & {*new[-1:]}:
            if new:  # every token but the last generated one is fed, and each fed token has a row
                logits = self.model(self.torch.tensor([tokens + new])).logits[0].float()
            new.append(self.sample(logits[-1], request.sampling, random))
        finish = "stop" if ends & {*new[-1:]} else "length"
        return Response(request.id, len(tokens), tokens=tuple(new), finish=finish, logits=logits.numpy())

    def sample(self, logits, asked, random):
        if asked.temperature == 0:
            return int(logits.argmax())
        p, ids = (logits.double() / asked.temperature).softmax(-1).sort(descending=True, stable=True)
        p = p[: asked.top_k or None] / p[: asked.top_k or None].sum()
        p[p.cumsum(0) - p >= asked.top_p] = 0  # kept: up to the token that reaches top_p, and that one
        return int(ids[self.torch.multinomial(p, 1, generator=random)])

    def close(self):
        self.model = None
