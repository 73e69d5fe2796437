"""Ask an unmodified Qwen-VL about a picture, from a quarter of its visual tokens.

python examples/attach_qwen.py Qwen/Qwen3-VL-2B-Instruct photo.jpg "what does the sign say?"
"""

import sys

from transformers import AutoModelForImageTextToText

from arr_coc import ARRCOCConfig, ARRCOCLayer, attach, load_processor

name, picture, question = sys.argv[1:]  # a Hub id or a directory, a file, a string
processor, model = load_processor(name), AutoModelForImageTextToText.from_pretrained(name, dtype="auto").eval()
layer = ARRCOCLayer(ARRCOCConfig.for_model(model))  # untrained: a training-free selector
chat = [{"role": "user", "content": [{"type": "image", "path": picture}, {"type": "text", "text": question}]}]
form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
with attach(model, layer, budget=0.25) as run:  # the usual calls; inside, a physically shorter prompt
    inputs = processor.apply_chat_template(chat, **form).to(run.device)  # a real one, also if weights are offloaded
    out = model.generate(**inputs, max_new_tokens=64)
print(processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(*(output.reason for output in run.output if output is not None))
