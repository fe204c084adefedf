//! Prints result lines.

use std::io::Write;

use record::Line;

/// Writes and flushes one line, so that a later crash does not lose it.
pub(crate) fn emit(line: &Line) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
