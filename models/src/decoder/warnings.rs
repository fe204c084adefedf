//! Warnings about the weight format: the tensors decide it, not config.json.

use std::collections::BTreeMap;

use quant::WeightFormat;

use crate::{Error, Weights};

/// Returns the warnings about weights loaded with `--quant`, one line each.
pub(super) fn warnings(
    weights: &Weights,
    quant: Option<WeightFormat>,
) -> Result<Vec<String>, Error> {
    if weights.claimed_bits().is_none() && quant.is_none() {
        return Ok(Vec::new());
    }
    let mut found = BTreeMap::new();
    for name in weights.layer_matrices().keys() {
        *found.entry(weights.checkpoint().weight(name)?.format()).or_insert(0) += 1;
    }
    Ok(told(weights.claimed_bits(), &found, quant))
}

/// Formats the warnings; `found` holds the number of matrices in each format.
fn told(
    claimed_bits: Option<u32>,
    found: &BTreeMap<Option<WeightFormat>, usize>,
    quant: Option<WeightFormat>,
) -> Vec<String> {
    let mut lines = Vec::new();
    let quantized = || found.iter().filter_map(|(format, count)| Some(((*format)?, *count)));
    if let (Some(bits), None) = (claimed_bits, quant)
        && let Some(own) = WeightFormat::with_bits(bits)
        && !quantized().any(|(format, _)| format.bits() == bits)
    {
        lines.push(format!(
            "config.json: `quantization_config.load_in_{bits}bit` is true, but no layer matrix \
             has {bits} bits; they keep the format of the files, and --quant {own} quantises the \
             dense ones"
        ));
    }
    let Some(quant) = quant else { return lines };
    let more = if quant.bits() < 8 { " or in 8 bits" } else { "" };
    for (kept, count) in quantized() {
        if kept.bits() == quant.bits() && kept != quant {
            let kept = kept.name().to_uppercase();
            lines.push(format!(
                "{count} of the matrices stay in {kept}, as in the files: --quant {quant} \
                 quantises matrices that are dense{more}"
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use WeightFormat::{Fp4, Int8, Nf4};

    #[test]
    fn a_claim_of_config_json_without_such_tensors_is_a_warning() {
        let say = |claimed, found: &[Option<WeightFormat>], quant| {
            told(claimed, &found.iter().map(|format| (*format, 7)).collect(), quant).join("\n")
        };
        let said = say(Some(4), &[None], None);
        assert!(said.contains("`quantization_config.load_in_4bit` is true"), "{said}");
        assert!(said.contains("--quant nf4") && !said.contains('\n'), "{said}");
        assert!(say(Some(8), &[None, Some(Nf4)], None).contains("load_in_8bit"));
        assert!(say(Some(4), &[Some(Int8)], None).contains("load_in_4bit"));
        // Some matrices may stay dense, and an explicit `--quant` overrides the claim.
        assert_eq!(say(Some(4), &[None, Some(Fp4)], None), "");
        assert_eq!(say(Some(8), &[None, Some(Int8)], None), "");
        assert_eq!(say(Some(4), &[None], Some(Nf4)), "");
        assert_eq!(say(None, &[None], Some(Nf4)), "");
    }

    #[test]
    fn matrices_that_stay_in_fp4_are_a_warning() {
        let found = BTreeMap::from([(None, 2), (Some(Fp4), 7)]);
        for claimed in [None, Some(4)] {
            let said = told(claimed, &found, Some(Nf4));
            let start = "7 of the matrices stay in FP4";
            assert!(said.len() == 1 && said[0].starts_with(start), "{said:?}");
            assert!(said[0].ends_with("that are dense or in 8 bits"), "{said:?}");
            assert!(told(claimed, &found, None).is_empty());
        }
    }
}
