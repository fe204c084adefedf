//! Assignment of tensors to files.

use std::collections::BTreeMap;
use std::path::Path;

use checkpoint::Plan;
use serde_json::json;

use super::{QuantizeError, folder};

/// A file of the result.
pub(super) struct Shard {
    pub(super) file: String,
    /// Tensors of the source, each with the tensors that it becomes.
    pub(super) tensors: Vec<(String, Vec<Plan>)>,
}

/// Splits tensors into files of at most `max` bytes. A larger tensor gets a file of its own. File names follow
/// transformers.
pub(super) fn split(tensors: Vec<(String, Vec<Plan>)>, max: u64) -> Vec<Shard> {
    let mut cuts: Vec<Vec<(String, Vec<Plan>)>> = vec![Vec::new()];
    let mut held = 0;
    for (name, plans) in tensors {
        let bytes = plans.iter().map(bytes).sum::<u64>();
        if held > 0 && held + bytes > max {
            cuts.push(Vec::new());
            held = 0;
        }
        held += bytes;
        if let Some(last) = cuts.last_mut() {
            last.push((name, plans));
        }
    }
    let all = cuts.len();
    let file = |index: usize| match all {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{:05}-of-{all:05}.safetensors", index + 1),
    };
    let shard = |(index, tensors)| Shard { file: file(index), tensors };
    cuts.into_iter().enumerate().map(shard).collect()
}

/// Returns the bytes of a tensor, without its text entries of some hundred bytes.
fn bytes(plan: &Plan) -> u64 {
    let values = plan.shape.iter().map(|shape| shape.iter().product::<usize>()).sum::<usize>();
    (values * plan.dtype.size()) as u64
}

/// Writes the index of tensors and files if there are several files.
pub(super) fn write_index(
    folder: &Path,
    shards: &[Shard],
    sizes: &BTreeMap<String, u64>,
) -> Result<(), QuantizeError> {
    if shards.len() == 1 {
        return Ok(());
    }
    let mut map = BTreeMap::new();
    for shard in shards {
        for plan in shard.tensors.iter().flat_map(|(_, plans)| plans) {
            map.insert(plan.name.as_str(), shard.file.as_str());
        }
    }
    let total: u64 = sizes.values().sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    let text = format!("{index:#}\n");
    folder::write(&folder.join("model.safetensors.index.json"), text.as_bytes())
}

#[cfg(test)]
mod tests {
    use checkpoint::DType;

    use super::*;

    #[test]
    fn files_hold_what_fits_and_at_least_one_tensor() {
        let tensor = |name: &str, len| {
            (name.to_owned(), vec![Plan::new(name, DType::F16, &[len]), Plan::text("state")])
        };
        let cut = |max| {
            let tensors = vec![tensor("a", 4), tensor("b", 4), tensor("c", 40), tensor("d", 1)];
            let shards = split(tensors, max);
            let names = |shard: &Shard| shard.tensors.iter().map(|t| t.0.clone()).collect();
            let names: Vec<Vec<String>> = shards.iter().map(names).collect();
            (names, shards[0].file.clone())
        };
        let (names, first) = cut(16);
        assert_eq!(names, [vec!["a", "b"], vec!["c"], vec!["d"]]);
        assert_eq!(first, "model-00001-of-00003.safetensors");
        assert_eq!(cut(15).0.len(), 4);
        assert_eq!(
            cut(98),
            (vec![["a", "b", "c", "d"].map(str::to_owned).to_vec()], "model.safetensors".into())
        );
    }
}
