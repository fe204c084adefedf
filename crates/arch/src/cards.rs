//! Published cards, to plan for without having them.
//!
//! Sources: NVIDIA's architecture papers (A100, GA102, Ada, Hopper, RTX Blackwell) and data sheets for processors, memory
//! and L2 cache; the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", for shared memory.
//! Only the totals of memory that `LEFT` cites were compared with reports; the other facts need a second look.

use crate::profile::{ArchId, ArchProfile, UnknownProfile};

/// A card that differs from a recorded one by these facts.
struct Card {
    name: &'static str,
    /// Name that a driver reports.
    reported: &'static str,
    /// Recorded profile with the same instructions.
    base: &'static str,
    compute_capability: u32,
    processors: u32,
    memory_gib: u64,
    /// Share of the memory that ECC leaves, in sixteenths: 15 for GDDR6 with ECC, else 16.
    ecc: u64,
    cache_mib: u64,
    shared_kib: u32,
}

/// Share of a card's memory that plans count on, in thousandths. In public reports CUDA's total is 976 (RTX A4000: 15.61
/// of 16 GiB), 980 (RTX 5090: 32117 of 32768 MiB), 985 (RTX 4090: 23.64 of 24 GiB) and 989 (A100: 81049 of 81920 MiB).
const LEFT: u64 = 965;

const fn geforce(
    name: &'static str,
    reported: &'static str,
    compute_capability: u32,
    [processors, memory, cache]: [u32; 3],
) -> Card {
    Card {
        name,
        reported,
        base: if compute_capability >= 120 { "rtx5090" } else { "rtx4090" },
        compute_capability,
        processors,
        memory_gib: memory as u64,
        ecc: 16,
        cache_mib: cache as u64,
        shared_kib: 99,
    }
}

const CARDS: [Card; 37] = [
    geforce("rtx3060", "NVIDIA GeForce RTX 3060", 86, [28, 12, 3]),
    geforce("rtx3060ti", "NVIDIA GeForce RTX 3060 Ti", 86, [38, 8, 4]),
    geforce("rtx3070", "NVIDIA GeForce RTX 3070", 86, [46, 8, 4]),
    geforce("rtx3070ti", "NVIDIA GeForce RTX 3070 Ti", 86, [48, 8, 4]),
    geforce("rtx3080", "NVIDIA GeForce RTX 3080", 86, [68, 10, 5]),
    geforce("rtx3080-12gb", "NVIDIA GeForce RTX 3080", 86, [70, 12, 6]),
    geforce("rtx3080ti", "NVIDIA GeForce RTX 3080 Ti", 86, [80, 12, 6]),
    geforce("rtx3090", "NVIDIA GeForce RTX 3090", 86, [82, 24, 6]),
    geforce("rtx3090ti", "NVIDIA GeForce RTX 3090 Ti", 86, [84, 24, 6]),
    geforce("rtx4060", "NVIDIA GeForce RTX 4060", 89, [24, 8, 24]),
    geforce("rtx4060ti", "NVIDIA GeForce RTX 4060 Ti", 89, [34, 8, 32]),
    geforce("rtx4060ti-16gb", "NVIDIA GeForce RTX 4060 Ti", 89, [34, 16, 32]),
    geforce("rtx4070", "NVIDIA GeForce RTX 4070", 89, [46, 12, 36]),
    geforce("rtx4070super", "NVIDIA GeForce RTX 4070 SUPER", 89, [56, 12, 48]),
    geforce("rtx4070ti", "NVIDIA GeForce RTX 4070 Ti", 89, [60, 12, 48]),
    geforce("rtx4070tisuper", "NVIDIA GeForce RTX 4070 Ti SUPER", 89, [66, 16, 48]),
    geforce("rtx4080", "NVIDIA GeForce RTX 4080", 89, [76, 16, 64]),
    geforce("rtx4080super", "NVIDIA GeForce RTX 4080 SUPER", 89, [80, 16, 64]),
    geforce("rtx4090", "NVIDIA GeForce RTX 4090", 89, [128, 24, 72]),
    geforce("rtx5060", "NVIDIA GeForce RTX 5060", 120, [30, 8, 32]),
    geforce("rtx5060ti", "NVIDIA GeForce RTX 5060 Ti", 120, [36, 8, 32]),
    geforce("rtx5060ti-16gb", "NVIDIA GeForce RTX 5060 Ti", 120, [36, 16, 32]),
    geforce("rtx5070", "NVIDIA GeForce RTX 5070", 120, [48, 12, 48]),
    geforce("rtx5070ti", "NVIDIA GeForce RTX 5070 Ti", 120, [70, 16, 48]),
    geforce("rtx5080", "NVIDIA GeForce RTX 5080", 120, [84, 16, 64]),
    geforce("rtx5090", "NVIDIA GeForce RTX 5090", 120, [170, 32, 96]),
    Card { ecc: 15, ..geforce("l4", "NVIDIA L4", 89, [58, 24, 48]) },
    Card { ecc: 15, ..geforce("l40s", "NVIDIA L40S", 89, [142, 48, 96]) },
    Card { ecc: 15, ..geforce("a10", "NVIDIA A10", 86, [72, 24, 6]) },
    Card { ecc: 15, ..geforce("a6000", "NVIDIA RTX A6000", 86, [84, 48, 6]) },
    Card { ecc: 15, ..geforce("rtx6000ada", "NVIDIA RTX 6000 Ada Generation", 89, [142, 48, 96]) },
    Card { shared_kib: 163, ..geforce("a100", "NVIDIA A100 80GB", 80, [108, 80, 40]) },
    Card { shared_kib: 163, ..geforce("a100-40gb", "NVIDIA A100 40GB", 80, [108, 40, 40]) },
    Card {
        shared_kib: 227,
        base: "h200",
        ..geforce("h100", "NVIDIA H100 80GB HBM3", 90, [132, 80, 50])
    },
    Card {
        shared_kib: 227,
        base: "h200",
        ..geforce("h100-pcie", "NVIDIA H100 PCIe", 90, [114, 80, 50])
    },
    Card { shared_kib: 227, base: "h200", ..geforce("h200", "NVIDIA H200", 90, [132, 141, 50]) },
    Card {
        shared_kib: 227,
        base: "h200",
        ..geforce("gh200", "NVIDIA GH200 480GB", 90, [132, 96, 50])
    },
];

impl ArchProfile {
    /// Returns the names of all published cards that [`ArchProfile::card`] knows.
    pub fn cards() -> impl Iterator<Item = &'static str> {
        CARDS.iter().map(|card| card.name)
    }

    /// Returns the profile of a published card with the memory that a driver leaves to programs. Unlike a recorded
    /// profile, it was not read from the card: it serves memory plans.
    ///
    /// # Errors
    /// [`UnknownProfile`] lists the names.
    pub fn card(name: &str) -> Result<Self, UnknownProfile> {
        let card =
            CARDS.iter().find(|card| card.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
                UnknownProfile {
                    name: name.to_owned(),
                    known: Self::cards().collect::<Vec<_>>().join(", "),
                }
            })?;
        let base = Self::recorded(card.base)?;
        let Card { compute_capability, processors, .. } = *card;
        Ok(Self {
            id: ArchId(format!("cuda-sm{compute_capability}-{processors}")),
            name: card.reported.to_owned(),
            compute_capability: Some(compute_capability),
            processors: Some(processors),
            memory_bytes: Some((card.memory_gib << 30) / 1000 * LEFT / 16 * card.ecc),
            cache_bytes: Some(card.cache_mib << 20),
            max_shared_bytes: card.shared_kib << 10,
            ..base
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::recorded;

    #[test]
    fn cards_agree_with_the_recorded_profiles() {
        for name in recorded() {
            let (card, recorded) = (ArchProfile::card(name), ArchProfile::recorded(name));
            let (card, recorded) = (card.expect("a card"), recorded.expect("recorded"));
            let facts = |own: &ArchProfile| {
                (
                    own.id.clone(),
                    own.processors,
                    own.max_shared_bytes,
                    own.tma,
                    own.compute_capability,
                )
            };
            assert_eq!(facts(&card), facts(&recorded), "{name}");
        }
    }

    /// CUDA's totals on these cards, in MiB, from public reports.
    #[test]
    fn memory_is_just_below_the_reported_totals() {
        for (name, reported) in
            [("rtx4090", 24_207), ("rtx5090", 32_117), ("a100-40gb", 40_339), ("a100", 81_049)]
        {
            let bytes = ArchProfile::card(name).expect("known").memory_bytes.expect("a GPU's");
            let share = (bytes >> 20) as f64 / f64::from(reported);
            assert!((0.96..1.0).contains(&share), "{name}: {share}");
        }
        let unknown = ArchProfile::card("rtx9090").expect_err("no such card").to_string();
        assert!(unknown.contains("rtx3060") && unknown.contains("h100"), "{unknown}");
    }
}
