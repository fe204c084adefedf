//! Printing lines as they come.

use std::io::Write;

use record::Line;

/// Writes one line and flushes it, so that a crash later loses nothing.
pub(crate) fn emit(line: &Line) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
