//! Table of matmuls with a column per precision.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use quant::WeightFormat;
use record::{DTYPES, Record};

use super::format::{millis, precision};
use super::table::{Align, Table};

/// Minimum number of precisions for which a matmul gets a row.
const FEWEST: usize = 3;

/// Table of medians with one row per matmul and one column per precision. If a matmul was measured twice in one
/// precision, the first record counts.
pub(crate) fn precisions(records: &[Record]) -> Table {
    let mut order = Vec::new();
    let mut medians: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
    for record in records {
        let (Some(product), Some(median)) = (product(record), record.median_ns) else { continue };
        if !medians.contains_key(&product) {
            order.push(product.clone());
        }
        medians.entry(product).or_default().entry(precision(record)).or_insert(median);
    }
    order.retain(|product| medians[product].len() >= FEWEST);
    let found: BTreeSet<&String> =
        order.iter().flat_map(|product| medians[product].keys()).collect();
    let mut columns: Vec<&String> = found.into_iter().collect();
    columns.sort_by_key(|name| place(name));
    let named = columns.iter().map(|name| (format!("{name} ms"), Align::Right));
    let mut table = Table::new([("product".to_owned(), Align::Left)].into_iter().chain(named));
    for product in &order {
        let of = |name: &&String| medians[product].get(*name).map(|ns| millis(*ns));
        let cells = columns.iter().map(|name| of(name).unwrap_or_default());
        table.row([product.clone()].into_iter().chain(cells));
    }
    table
}

/// Sort key of a precision: unquantised dtypes first, then weight formats from wide to narrow.
fn place(precision: &str) -> (usize, Option<Reverse<u32>>) {
    let dtype = DTYPES.iter().position(|dtype| precision.starts_with(dtype));
    let format = precision.split(' ').next().and_then(|name| name.parse::<WeightFormat>().ok());
    (dtype.unwrap_or(DTYPES.len()), format.map(|format| Reverse(format.bits())))
}

/// Name of a matmul without its precision: `4096x4096x4096 lhs=row rhs=col`.
fn product(record: &Record) -> Option<String> {
    let mut params = record.params.clone();
    match record.op.as_str() {
        "matmul" => {}
        // The weight is `[n, k]`, like that of a linear layer.
        op if op.parse::<WeightFormat>().is_ok() => {
            params.retain(|name, _| !matches!(name.as_str(), "block_size" | "nested" | "order"));
            params.extend([("lhs", "row"), ("rhs", "col")].map(|(k, v)| (k.to_owned(), v.into())));
        }
        _ => return None,
    }
    params.remove("dtype");
    Some(record::case_name("", &params).trim_start().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::sample;
    use super::super::table::Style;
    use super::*;

    fn record(op: &str, params: &Value, median: f64) -> Record {
        let mut record = sample::run()[0].records[1].clone();
        let sizes = json!({ "m": 8, "n": 32, "k": 16 });
        let all = sizes.as_object().unwrap().iter().chain(params.as_object().unwrap());
        record.op = op.into();
        record.params = all.map(|(name, value)| (name.clone(), value.clone())).collect();
        record.median_ns = Some(median);
        record
    }

    #[test]
    fn a_product_is_one_row_from_the_widest_precision_to_the_narrowest() {
        let linear = |dtype: &str| json!({ "dtype": dtype, "lhs": "row", "rhs": "col" });
        let blocks = |order: &str| json!({ "dtype": "bf16", "block_size": 64, "nested": true, "order": order });
        let records = [
            record("nf4", &blocks("tiles"), 1e6),
            record("nf4", &blocks("rows"), 9e6),
            record("int8", &json!({ "dtype": "bf16" }), 2e6),
            record("matmul", &linear("bf16"), 3e6),
            record("matmul", &linear("f16"), 3.5e6),
            record("matmul", &linear("tf32"), 4e6),
            record("matmul", &linear("f32"), 5e6),
        ];
        insta::assert_snapshot!(precisions(&records).render(Style::Markdown), @r"
        | product | f32 ms | tf32 ms | f16 ms | bf16 ms | int8 (bf16) ms | nf4 (bf16) ms |
        | --- | ---: | ---: | ---: | ---: | ---: | ---: |
        | 8x32x16 lhs=row rhs=col | 5.00 | 4.00 | 3.50 | 3.00 | 2.00 | 1.00 |
        ");
    }

    #[test]
    fn what_else_is_computed_makes_another_product() {
        let other = |name: &str, value: Value| {
            let mut params = json!({ "dtype": "f32", "lhs": "row", "rhs": "col" });
            params[name] = value;
            record("matmul", &params, 1e6)
        };
        let records = [
            other("dtype", "bf16".into()),
            other("dtype", "f16".into()),
            other("rhs", "row".into()),
            other("groups", 2.into()),
            record("int8_quantize", &json!({ "dtype": "bf16" }), 1e6),
            record("nf4", &json!({ "dtype": "bf16", "glu": true }), 1e6),
        ];
        assert!(precisions(&records).rows().is_empty(), "{:?}", precisions(&records));
        let third = [&records[..], &[other("dtype", "f32".into())]].concat();
        assert_eq!(precisions(&third).rows().len(), 1);
    }
}
