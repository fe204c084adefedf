//! Sets the lengths of named dimensions. -1, which some exporters write for any length, becomes
//! unknown.

use std::collections::{BTreeMap, BTreeSet};

use crate::OnnxError;
use crate::error::invalid;
use crate::proto::{GraphProto, Length, TensorTypeProto, TypeProto, TypeValue, ValueInfoProto};

/// Replaces dimension names by lengths in the types of inputs, outputs and values.
///
/// # Errors
/// [`OnnxError::Dimension`] for a name that no input has; [`OnnxError::Invalid`] for other negative
/// lengths.
pub(super) fn set_lengths(
    graph: &mut GraphProto,
    numbers: &BTreeMap<String, u64>,
) -> Result<(), OnnxError> {
    let mut names = BTreeSet::new();
    for input in &mut graph.input {
        each(input, &mut |own| {
            if let Some(Length::Name(name)) = own {
                names.insert(name.clone());
            }
        });
    }
    if let Some(name) = numbers.keys().find(|name| !names.contains(*name)) {
        let have = names.into_iter().collect();
        return Err(OnnxError::Dimension { name: name.clone(), have });
    }
    let mut negative = None;
    for value in graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info) {
        let name = value.name.clone();
        each(value, &mut |own| match own {
            Some(Length::Name(name)) => {
                if let Some(number) = numbers.get(name) {
                    *own = Some(Length::Number(i64::try_from(*number).unwrap_or(i64::MAX)));
                }
            }
            Some(Length::Number(-1)) => *own = None,
            Some(Length::Number(number)) if *number < 0 => negative = Some((name.clone(), *number)),
            _ => {}
        });
    }
    match negative {
        Some((name, number)) => {
            Err(invalid(format!("expected dimensions of 0 or more for `{name}`, got {number}")))
        }
        None => Ok(()),
    }
}

fn each(value: &mut ValueInfoProto, change: &mut impl FnMut(&mut Option<Length>)) {
    let tensor = match &mut value.r#type {
        Some(TypeProto {
            value: Some(TypeValue::Tensor(tensor) | TypeValue::SparseTensor(tensor)),
        }) => tensor,
        _ => return,
    };
    let TensorTypeProto { shape: Some(shape), .. } = tensor else { return };
    shape.dim.iter_mut().for_each(|own| change(&mut own.value));
}
