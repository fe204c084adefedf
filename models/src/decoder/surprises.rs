//! What a caller may not expect of how the matrices of the layers are held: tensors decide it, not config.json.

use std::collections::BTreeMap;

use checkpoint::{QuantType, Weight};

use super::Quant;
use crate::{Error, Matrices, Weights};

/// How a file has a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Dense,
    Int8,
    Nf4,
    Fp4,
}

/// A line for each.
pub(super) fn surprises(weights: &Weights, quant: Option<Quant>) -> Result<Vec<String>, Error> {
    if weights.claimed().is_none() && !matches!(quant, Some(Quant::Nf4(_))) {
        return Ok(Vec::new());
    }
    let mut kinds = BTreeMap::new();
    for name in weights.layer_matrices().keys() {
        let kind = match weights.checkpoint().weight(name)? {
            Weight::Dense(_) => Kind::Dense,
            Weight::Int8(_) => Kind::Int8,
            Weight::FourBit(weight) => match weight.layout.quant_type {
                QuantType::Nf4 => Kind::Nf4,
                QuantType::Fp4 => Kind::Fp4,
            },
        };
        *kinds.entry(kind).or_insert(0) += 1;
    }
    Ok(told(weights.claimed(), &kinds, quant))
}

/// `kinds` has how many matrices there are of each.
fn told(
    claimed: Option<Matrices>,
    kinds: &BTreeMap<Kind, usize>,
    quant: Option<Quant>,
) -> Vec<String> {
    let has = |kind| kinds.contains_key(&kind);
    let (field, bits, own, there) = match claimed {
        Some(Matrices::FourBit) => ("load_in_4bit", 4, "nf4", has(Kind::Nf4) || has(Kind::Fp4)),
        Some(Matrices::Int8) => ("load_in_8bit", 8, "int8", has(Kind::Int8)),
        Some(Matrices::Dense) | None => ("", 0, "", true),
    };
    let mut lines = Vec::new();
    if !there && quant.is_none() {
        lines.push(format!(
            "config.json: `quantization_config.{field}` is true, and no matrix of a layer is in {bits} bits; they are \
             loaded as the files have them, and --quant {own} quantises those that are dense"
        ));
    }
    if let (Some(Quant::Nf4(_)), Some(count)) = (quant, kinds.get(&Kind::Fp4)) {
        lines.push(format!(
            "{count} of the matrices are in FP4 in the files and stay so: --quant nf4 quantises those that are dense or \
             in 8 bits"
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use ops::Nf4Options;

    use super::*;

    #[test]
    fn what_config_json_claims_and_no_tensor_is_is_said() {
        let nf4 = Some(Quant::Nf4(Nf4Options::default()));
        let say = |claimed, kinds: &[Kind], quant| {
            told(claimed, &kinds.iter().map(|kind| (*kind, 7)).collect(), quant).join("\n")
        };
        let (four, eight) = (Some(Matrices::FourBit), Some(Matrices::Int8));
        let said = say(four, &[Kind::Dense], None);
        assert!(said.contains("`quantization_config.load_in_4bit` is true"), "{said}");
        assert!(said.contains("--quant nf4") && !said.contains('\n'), "{said}");
        assert!(say(eight, &[Kind::Dense, Kind::Nf4], None).contains("load_in_8bit"));
        assert!(say(four, &[Kind::Int8], None).contains("load_in_4bit"));
        // Some may be left out, and whoever asks for a precision gets it.
        assert_eq!(say(four, &[Kind::Dense, Kind::Fp4], None), "");
        assert_eq!(say(eight, &[Kind::Dense, Kind::Int8], None), "");
        assert_eq!(say(four, &[Kind::Dense], nf4), "");
        assert_eq!(say(None, &[Kind::Dense], None), "");
    }

    #[test]
    fn fp4_that_stays_is_said() {
        let nf4 = Some(Quant::Nf4(Nf4Options::default()));
        let kinds = BTreeMap::from([(Kind::Dense, 2), (Kind::Fp4, 7)]);
        for claimed in [None, Some(Matrices::FourBit)] {
            let said = told(claimed, &kinds, nf4);
            assert!(
                said.len() == 1 && said[0].starts_with("7 of the matrices are in FP4"),
                "{said:?}"
            );
            assert!(told(claimed, &kinds, None).is_empty());
        }
    }
}
