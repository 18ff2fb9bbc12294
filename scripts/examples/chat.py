"""A conversation: a list of messages, to which every answer is added."""

import llamagpu

messages = [{"role": "system", "content": "You answer in one short sentence."}]
with llamagpu.load("smollm2") as llama:
    for question in ("What is the capital of France?", "And of Italy?"):
        messages.append({"role": "user", "content": question})
        answer = llama.chat(messages, max_tokens=24, sampling=llamagpu.Sampling(temperature=0))
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}")
        used = answer.usage
        print(f"  ({used.prompt_tokens} prompt tokens, {used.cached_tokens} of them computed before)")
