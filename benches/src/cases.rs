//! Cases of a suite, selected by name.

use std::cmp::Reverse;
use std::path::Path;

use anyhow::bail;
use suite::{AnyBench, KERNELS, Scale, Suite};

use crate::model_cases::ModelCase;

/// Names of the ceilings, for filters.
pub(crate) const CEILINGS: [&str; 6] =
    ["copy", "mma f32", "mma tf32", "mma f16", "mma bf16", "mma f16acc16"];

/// Selects the kernel cases of `suite` whose name contains `filter`. The result is empty if the filter matches only
/// cases of the other scale.
///
/// # Errors
/// The filter matches no case of either scale.
pub(crate) fn select(
    suite: Suite,
    scale: Scale,
    filter: Option<&str>,
) -> anyhow::Result<Vec<Box<dyn AnyBench>>> {
    if let Some(filter) = filter {
        check_filter(suite, filter)?;
    }
    let mut cases = all(suite, scale);
    cases.retain(|case| filter.is_none_or(|f| case.name().contains(f)));
    Ok(cases)
}

fn all(suite: Suite, scale: Scale) -> Vec<Box<dyn AnyBench>> {
    KERNELS.iter().flat_map(|kernel| kernel.bench_cases(suite, scale)).collect()
}

/// Refuses a filter that matches no case of the suite, on a GPU or on a CPU, and no ceiling.
pub(crate) fn check_filter(suite: Suite, filter: &str) -> anyhow::Result<()> {
    let names = names(suite);
    if names.iter().any(|name| name.contains(filter)) {
        return Ok(());
    }
    let near: Vec<_> = nearest(&names, filter).iter().map(|name| format!("`{name}`")).collect();
    bail!(
        "no case of suite {suite} has `{filter}` in its name\nhint: use part of a case name such \
         as {}",
        near.join(", ")
    )
}

/// Returns the three names that contain the most words of the filter. Ties keep their order.
fn nearest(names: &[String], filter: &str) -> Vec<String> {
    let filter = filter.to_lowercase();
    let words =
        |name: &String| filter.split_whitespace().filter(|word| name.contains(word)).count();
    let mut near = names.to_vec();
    near.sort_by_key(|name| Reverse(words(name)));
    near.truncate(3);
    near
}

/// Sorted names of a suite's cases for a GPU and for a CPU, and of the ceilings.
fn names(suite: Suite) -> Vec<String> {
    let kernels = [Scale::Gpu, Scale::Host].into_iter().flat_map(|scale| all(suite, scale));
    let mut names: Vec<_> = kernels.map(|case| case.name()).collect();
    names.extend(CEILINGS.map(str::to_owned));
    // The name does not depend on the folder of the demo model.
    let models = crate::model_cases::select(suite, Scale::Gpu, None, Some(Path::new("demo")));
    names.extend(models.iter().map(ModelCase::name));
    names.sort();
    names.dedup();
    names
}

/// Prints the names of a suite's cases.
pub(crate) fn list(suite: Suite, filter: Option<&str>) -> anyhow::Result<bool> {
    if let Some(filter) = filter {
        check_filter(suite, filter)?;
    }
    let shown = names(suite).into_iter().filter(|n| filter.is_none_or(|f| n.contains(f)));
    command::print(&shown.map(|name| name + "\n").collect::<String>())?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_for_gpus_selects_nothing_on_a_cpu_and_is_no_mistake() {
        let select = |scale, filter| select(Suite::Quick, scale, Some(filter)).map(|c| c.len());
        assert!(matches!(select(Scale::Gpu, "14336x4096"), Ok(1..)));
        assert!(matches!(select(Scale::Host, "14336x4096"), Ok(0)));
        assert!(matches!(select(Scale::Host, "copy"), Ok(0)), "a ceiling");
        let error = select(Scale::Host, "conv").expect_err("there is none").to_string();
        assert!(error.contains("\nhint: use part of a case name such as `"), "{error}");
    }

    #[test]
    fn names_near_a_filter_share_its_words() {
        let names = ["copy mib=480", "matmul f32 8x8x8", "matmul bf16 8x8x8", "nf4 bf16 1x8x8"]
            .map(str::to_owned);
        let near = |filter: &str| nearest(&names, filter);
        let [copy, f32, bf16, nf4] = names.clone();
        assert_eq!(near("Matmul BF16 9x9x9"), [bf16.clone(), f32.clone(), nf4]);
        assert_eq!(near("alien"), [copy, f32, bf16], "in their order");
    }
}
