//! Runs the tests of ONNX in a folder on the host: `conformance onnx/backend/test/data/node [NAME]`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

use burn::backend::{DispatchDevice, FlexDevice};
use onnx::conformance::{Outcome, check};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (root, only) = (args.next().ok_or("a folder with tests")?, args.next());
    // Burn's panics are outcomes.
    std::panic::set_hook(Box::new(|_| {}));
    let device = DispatchDevice::Flex(FlexDevice);
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(root)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    folders.sort();
    let mut counts = BTreeMap::new();
    for folder in folders.into_iter().filter(|own| own.join("model.onnx").exists()) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if only.as_ref().is_some_and(|only| !name.contains(only)) {
            continue;
        }
        let outcome = check(&folder, &device, &device);
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
