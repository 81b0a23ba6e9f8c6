"""A target in about 40 lines: any engine that gives logits, here plain transformers.

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
        self.limit, self.vocab = deployment.max_context, self.model.config.vocab_size
        shown = frozenset({"logits", "text"})
        return Info("my-engine", transformers.__version__, "endpoint", observables=shown, vocab_size=self.vocab)

    def run(self, requests):
        for request in requests:
            total = len(request.prompt) + request.max_new_tokens
            if not request.prompt or total > self.limit or not all(0 <= t < self.vocab for t in request.prompt):
                yield Response(request.id, len(request.prompt), error="the prompt is empty, too long or no tokens")
            else:
                yield self.answer(request)

    def answer(self, request):
        import torch

        tokens = list(request.prompt)
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens])).logits[0].float()  # row i: what follows token i
            for step in range(request.max_new_tokens):
                if step:  # every token but the last generated one is fed, and each fed token has a row
                    logits = self.model(torch.tensor([tokens])).logits[0].float()
                tokens.append(int(logits[-1].argmax()))
        new = tuple(tokens[len(request.prompt) :])
        return Response(request.id, len(request.prompt), tokens=new, logits=logits.numpy())

    def close(self):
        self.model = None
