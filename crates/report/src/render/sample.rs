//! A fixed run of two backends, for tests of the renderers.

use record::{Line, Record};

use crate::stream::Column;

/// `cuda` is complete. `cpu` has a failed case, a skipped case, and crashed.
pub(crate) fn run() -> Vec<Column> {
    let mut cpu = column("cpu", include_str!("sample/cpu.jsonl"));
    cpu.broken = Some("program ended by signal 9 (killed, often for lack of memory) in case copy f32 n=1073741824".into());
    vec![column("cuda", include_str!("sample/cuda.jsonl")), cpu]
}

/// Requests to two models.
pub(crate) fn requests() -> Vec<Record> {
    column("cuda", include_str!("sample/requests.jsonl")).records
}

fn column(backend: &str, text: &str) -> Column {
    let mut column = Column { backend: backend.into(), ..Column::default() };
    for line in text.lines() {
        match serde_json::from_str(line).expect("the sample is of this schema") {
            Line::Card(card) => column.card = Some(card),
            Line::Record(record) => column.records.push(record),
            Line::Skip { case, reason } => column.skips.push((case, reason)),
            Line::Check(check) => column.checks.push(check),
            Line::Plan { .. } | Line::Begin { .. } => {}
        }
    }
    column
}
