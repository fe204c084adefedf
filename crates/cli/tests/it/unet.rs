//! Tests `flashover unet`.

use std::path::Path;

use flashover::host::HostTensor;
use safetensors::SafeTensors;

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
    write(&input, &[("sample", &sample), ("timestep", &timestep)]);
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
}

#[test]
fn pictures_are_sampled_from_noise() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let picture = |seed: &str, method: &str| {
        let path = dir.path().join("picture.png");
        let model = fixture("unet").join("plain");
        let args = ["unet", "run", "--backend", "cpu", "--steps", "2", "--seed", seed, "-b", "2"];
        let paths =
            ["--model", model.to_str().expect("UTF-8"), "--picture", path.to_str().expect("UTF-8")];
        let done = flashover(&[&args[..], &["--method", method], &paths].concat());
        assert!(done.status.success(), "{}", text(&done.stderr));
        let file = std::fs::File::open(&path).expect("written");
        let mut reader = png::Decoder::new(std::io::BufReader::new(file)).read_info().expect("PNG");
        let mut pixels = vec![0; reader.output_buffer_size().expect("small")];
        let info = reader.next_frame(&mut pixels).expect("PNG");
        assert_eq!((info.width, info.height), (2 * 8, 6));
        pixels
    };
    let first = picture("1", "ddim");
    assert_eq!(first, picture("1", "ddim"));
    assert!(first != picture("2", "ddim") && first != picture("1", "euler"));
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
