"""Text as it is generated, what is known about it afterwards, and log probabilities."""

import llamagpu

greedy = llamagpu.Sampling(temperature=0)
with llamagpu.load("smollm2") as llama:
    prompt = "The sun rises in the east and"
    run = llama.complete(prompt, max_tokens=16, sampling=greedy, stop="\n", stream=True)
    print(prompt, end="")
    for token in run:
        print(token.text, end="", flush=True)
    print(f"\n[{run.finish_reason}: {run.usage.completion_tokens} tokens, {run.timings.decode_tps:.0f} tok/s]")

    # The log probabilities of the three likeliest tokens.
    answer = llama.complete("The capital of France is", max_tokens=1, sampling=greedy, logprobs=3)
    for likely in answer.logprobs[0].top:
        print(f"{likely.logprob:6.2f} {likely.text!r}")
