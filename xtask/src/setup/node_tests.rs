//! The tests of ONNX's operators. The wheel of onnx 1.22.0 is the last one that has them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use report::fail::check;

use super::{Missing, announce, wheels};

/// Folder in the user's cache. Change it with the pin below.
const CACHE: &str = "flashover/onnx-1.22.0";

const WHEEL: &str = "onnx==1.22.0";

/// Returns the folder of the tests, if they were downloaded.
pub(crate) fn found() -> Result<PathBuf, Missing> {
    let home = dirs::cache_dir().map(|cache| cache.join(CACHE));
    home.filter(|home| holds_tests(home))
        .ok_or_else(|| "needs the tests of onnx 1.22.0 (`cargo xtask setup` downloads them)".into())
}

/// Returns the folder of the tests, and downloads them if they are missing. The inner error is the reason why they are unavailable.
pub(super) fn found_or_fetched() -> Result<Result<PathBuf, Missing>> {
    if let Ok(home) = found() {
        return Ok(Ok(home));
    }
    if let Err(commands) = wheels::pip("the tests of ONNX are distributed as a Python wheel")? {
        return Ok(Err(format!("needs the tests of onnx 1.22.0 (fetched by pip: {commands})")));
    }
    let home = dirs::cache_dir().context("no cache folder for this user")?.join(CACHE);
    announce(&format!("fetching the tests of onnx 1.22.0 into {}", home.display()));
    let prepare = |root: &Path| match holds_tests(root) {
        true => Ok(()),
        false => Err(check("the wheel of onnx 1.22.0 has no tests")),
    };
    let fetched = wheels::fetch(&home, &[WHEEL], "onnx/backend/test/data", prepare)?;
    Ok(fetched.map(|()| home).map_err(|why| format!("needs the tests of onnx 1.22.0 ({why})")))
}

fn holds_tests(home: &Path) -> bool {
    home.join("node/test_relu/model.onnx").is_file()
}
