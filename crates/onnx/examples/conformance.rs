//! Runs the tests of ONNX in a folder: `conformance onnx/backend/test/data/node [NAME] [cpu|cuda|vulkan|cubecl] [PASSES]`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

use burn::tensor::Device;
use onnx::Options;
use onnx::conformance::{Outcome, check};
use onnx::passes::Passes;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let root = args.next().ok_or("a folder with tests")?;
    let (only, device) = (args.next().unwrap_or_default(), args.next().unwrap_or_default());
    let passes = Passes::parse(&args.next().unwrap_or_default())?;
    // Burn's panics are outcomes.
    std::panic::set_hook(Box::new(|_| {}));
    let device = match device.as_str() {
        "cuda" => Device::cuda(0),
        "vulkan" => Device::vulkan(burn::tensor::DeviceKind::default()),
        "cubecl" => Device::cpu(),
        _ => Device::flex(),
    };
    let options = Options { passes, ..Options::default() };
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(root)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    folders.sort();
    let mut counts = BTreeMap::new();
    for folder in folders.into_iter().filter(|own| own.join("model.onnx").exists()) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.contains(&only) {
            continue;
        }
        let outcome = check(&folder, &options, &device);
        let kind = match &outcome {
            Outcome::Passed => "passed",
            Outcome::Refused(_) => "refused",
            Outcome::Failed(_) => "failed",
            Outcome::Wrong(_) => "wrong",
        };
        *counts.entry(kind).or_insert(0) += 1;
        if outcome != Outcome::Passed {
            println!("{name}: {outcome:?}");
        }
    }
    println!("{counts:?}");
    Ok(())
}
