//! Tests `flashover unet`.

use std::path::Path;

use flashover::host::HostTensor;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::{fixture, flashover, write};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn golden(name: &str, tensor: &str) -> HostTensor {
    let bytes = std::fs::read(fixture("unet").join(name).join("golden.safetensors"));
    let bytes = bytes.expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let view = file.tensor(tensor).expect("unet.py writes it");
    let words = view.data().as_chunks::<4>().0;
    let values: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
    HostTensor::from_f32(view.shape(), &values).expect("as many values as the shape holds")
}

/// Runs frames of a fixture and returns the result, or the error.
fn run(folder: &Path, input: &Path, output: &Path) -> Result<Vec<f32>, String> {
    let [folder, input, target] = [folder, input, output].map(|p| p.to_str().expect("UTF-8"));
    let args = ["unet", "run", "--backend", "cpu", "--frames", "2", "--dtype", "f32"];
    let paths = ["--model", folder, "--input", input, "--output", target];
    let done = flashover(&[&args[..], &paths].concat());
    if !done.status.success() {
        return Err(text(&done.stderr));
    }
    let bytes = std::fs::read(output).expect("written");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let sample = file.tensor("sample").expect("named sample");
    assert_eq!(sample.shape(), [2, 3, 6, 8]);
    let words = sample.data().as_chunks::<4>().0;
    Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

#[test]
fn a_frame_of_a_folder_is_that_of_diffusers() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let (input, output) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let (sample, timestep) = (golden("plain", "sample"), golden("plain", "timestep"));
    // Torch counts timesteps in 64 bits.
    let steps = timestep.to_f32().expect("f32").into_iter().flat_map(|t| (t as i64).to_le_bytes());
    let steps: Vec<u8> = steps.collect();
    let steps = TensorView::new(Dtype::I64, vec![2], &steps).expect("as many values");
    let view = TensorView::new(Dtype::F32, sample.shape().to_vec(), sample.bytes()).expect("f32");
    let file = safetensors::serialize([("sample", view), ("timestep", steps)], None);
    std::fs::write(&input, file.expect("valid")).expect("written");
    let folder = fixture("unet").join("plain");
    let result = run(&folder, &input, &output).expect("valid");
    let want = golden("plain", "f32").to_f32().expect("f32");
    let largest = want.iter().fold(0f32, |top, value| top.max(value.abs()));
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 3e-6 * largest;
    assert!(result.iter().zip(&want).all(near));
    // Inputs that are missing or of another size.
    write(&input, &[("sample", &sample)]);
    let error = run(&folder, &input, &output).expect_err("refused");
    assert!(error.contains("the input has no `timestep`\nhint: add the timestep"), "{error}");
    let odd = HostTensor::from_f32(&[2, 3, 5, 8], &[0.0; 240]).expect("as many values");
    write(&input, &[("sample", &odd), ("timestep", &timestep)]);
    let error = run(&folder, &input, &output).expect_err("refused");
    assert!(
        error.contains("expected height and width that are multiples of 2, got [5, 8]\nhint: ")
    );
    let error = run(&input, &input, &output).expect_err("refused");
    assert!(error.contains("\nhint: "), "{error}");
    let nan = HostTensor::from_f32(&[2, 3, 6, 8], &[f32::NAN; 288]).expect("as many values");
    let pair = HostTensor::from_f32(&[3], &[1.0; 3]).expect("as many values");
    let classes = HostTensor::from_f32(&[2], &[1.0; 2]).expect("as many values");
    for (tensors, want) in [
        (
            vec![("sample", &nan), ("timestep", &timestep)],
            "`sample` has values that are infinite or NaN",
        ),
        (vec![("sample", &sample), ("timestep", &pair)], "expected timestep of shape [2], got [3]"),
        (
            vec![("sample", &sample), ("timestep", &timestep), ("classes", &classes)],
            "the model does not read `classes`",
        ),
        (
            vec![("sample", &pair), ("timestep", &timestep)],
            "expected a sample of shape [batch, 3, ",
        ),
    ] {
        write(&input, &tensors);
        let error = run(&folder, &input, &output).expect_err("refused");
        assert!(error.contains(want) && error.contains("\nhint: "), "{error}");
    }
}

#[test]
fn outputs_replace_nothing_that_is_read() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let model = dir.path().join("model");
    std::fs::create_dir(&model).expect("created");
    for name in ["config.json", "diffusion_pytorch_model.safetensors"] {
        std::fs::copy(fixture("unet").join("plain").join(name), model.join(name)).expect("copied");
    }
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let weights = path("model/diffusion_pytorch_model.safetensors");
    let (model, one) = (path("model"), path("one"));
    let refused = |args: &[&str], want: &str| {
        let run = ["unet", "run", "--backend", "cpu", "--model", &model];
        let done = flashover(&[&run[..], args].concat());
        let error = text(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{error}");
        assert!(error.contains(want) && error.contains("hint: "), "{error}");
    };
    let steps = ["--steps", "1", "--output"];
    refused(&[&steps[..], &[&weights]].concat(), "which is read");
    refused(&[&steps[..], &[&one, "--picture", &one]].concat(), "are the same file");
    refused(&["--steps", "0", "--output", &one], "expected 1 to 1000 steps, got 0");
    // The scheduler next to the folder is read, too.
    let scheduler = path("scheduler/scheduler_config.json");
    std::fs::create_dir(dir.path().join("scheduler")).expect("created");
    std::fs::write(&scheduler, r#"{"_class_name": "DDIMScheduler"}"#).expect("written");
    refused(&[&steps[..], &[&scheduler]].concat(), "which is read");
    std::fs::write(&scheduler, r#"{"_class_name": "HeunDiscreteScheduler"}"#).expect("written");
    refused(&[&steps[..], &[&one]].concat(), "`_class_name` is \"HeunDiscreteScheduler\"");
    std::fs::remove_file(&scheduler).expect("removed");
    let sample = golden("plain", "sample");
    let input = path("in.safetensors");
    write(Path::new(&input), &[("sample", &sample)]);
    let given = ["--input", &input, "--output", &one];
    refused(&[&given[..], &["--steps", "1"]].concat(), "sampling does not read `sample`");
    refused(&[&given[..], &["--size", "8"]].concat(), "--steps");
    let text_model = fixture("unet").join("text");
    let args = ["unet", "run", "--backend", "cpu", "--steps", "1", "--picture", &one, "--model"];
    let done = flashover(&[&args[..], &[text_model.to_str().expect("UTF-8")]].concat());
    let error = text(&done.stderr);
    assert!(
        error.contains("expected a model with 1 or 3 channels for --picture, got 4"),
        "{error}"
    );
}

#[test]
fn pictures_are_sampled_from_noise() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let path = dir.path().join("picture.png");
    let model = fixture("unet").join("plain");
    let args = ["unet", "run", "--backend", "cpu", "--steps", "2", "--method", "euler", "-b", "2"];
    let paths =
        ["--model", model.to_str().expect("UTF-8"), "--picture", path.to_str().expect("UTF-8")];
    let done = flashover(&[&args[..], &paths].concat());
    assert!(done.status.success(), "{}", text(&done.stderr));
    let file = std::fs::File::open(&path).expect("written");
    let mut reader = png::Decoder::new(std::io::BufReader::new(file)).read_info().expect("PNG");
    let mut pixels = vec![0; reader.output_buffer_size().expect("small")];
    let info = reader.next_frame(&mut pixels).expect("PNG");
    assert_eq!((info.width, info.height), (2 * 8, 6));
    assert!(pixels.iter().any(|value| *value != pixels[0]));
}

#[test]
fn a_plan_needs_no_device() {
    let plan = |args: &[&str]| flashover(&[&["unet", "plan"][..], args].concat());
    let done = plan(&["--shape", "unet-880m"]);
    let said = text(&done.stdout);
    assert!(said.contains("parameters       876.7 M\n"), "{said}");
    assert!(said.contains("work             353.2 GFLOP a frame\n"), "{said}");
    let done = plan(&["--shape", "unet-1b", "--profile", "rtx4080"]);
    let said = text(&done.stdout);
    assert!(done.status.success() && said.contains(" MiB, NVIDIA GeForce RTX 4080\n"), "{said}");
    let large = ["--shape", "unet-1b", "--profile", "rtx4080", "-b", "8", "--size", "1024"];
    let done = plan(&large);
    assert_eq!(done.status.code(), Some(2));
    assert!(
        text(&done.stderr).contains("a frame does not fit on NVIDIA"),
        "{}",
        text(&done.stderr)
    );
    let layers = text(&plan(&["--shape", "sd15", "--layers", "-b", "2"]).stdout);
    assert!(layers.contains("| mid_block.attentions.0 | "), "{layers}");
    let unknown = &["--shape", "sd15", "--profile", "rtx1"];
    for args in [&["--shape", "unet-1m"][..], &["--shape", "sd15", "--size", "63"], &[], unknown] {
        let done = plan(args);
        assert_eq!(done.status.code(), Some(2), "{args:?}");
        assert!(text(&done.stderr).contains("hint: "), "{}", text(&done.stderr));
    }
}
