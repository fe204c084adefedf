//! Cases that have every two choices of several factors together: far fewer than the whole product, and what goes wrong
//! mostly goes wrong between two.
//!
//! Source: Cohen, Dalal, Fredman and Patton, "The AETG System: An Approach to Testing Based on Combinatorial Design" (1997),
//! without its chance: each row begins with the first pair that is open and takes what closes most.

use std::collections::BTreeSet;

/// Rows of one choice for each factor, factor i having `choices[i]` of them; every pair of choices is in a row.
pub(crate) fn pairwise(choices: &[usize]) -> Vec<Vec<usize>> {
    let mut open = BTreeSet::new();
    for (a, of_a) in choices.iter().enumerate() {
        for (b, of_b) in choices.iter().enumerate().skip(a + 1) {
            open.extend((0..*of_a).flat_map(|x| (0..*of_b).map(move |y| [(a, x), (b, y)])));
        }
    }
    let mut rows = Vec::new();
    while let Some(&[(a, x), (b, y)]) = open.first() {
        let mut row: Vec<Option<usize>> = vec![None; choices.len()];
        (row[a], row[b]) = (Some(x), Some(y));
        for factor in 0..choices.len() {
            if row[factor].is_some() {
                continue;
            }
            let closes = |choice: usize| {
                let with = row.iter().enumerate().filter_map(|(other, taken)| {
                    let (mine, theirs) = ((factor, choice), (other, (*taken)?));
                    Some(if factor < other { [mine, theirs] } else { [theirs, mine] })
                });
                with.filter(|pair| open.contains(pair)).count()
            };
            // Of equals, another one in each row.
            let turned = (0..choices[factor]).map(|i| (i + rows.len()) % choices[factor]);
            row[factor] = turned.max_by_key(|choice| closes(*choice));
        }
        let row: Vec<usize> = row.into_iter().flatten().collect();
        open.retain(|[(a, x), (b, y)]| row[*a] != *x || row[*b] != *y);
        rows.push(row);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_two_choices_meet_in_few_rows() {
        let choices = [7, 3, 5, 2, 3, 3, 2];
        let rows = pairwise(&choices);
        for a in 0..choices.len() {
            for b in a + 1..choices.len() {
                for (x, y) in (0..choices[a]).flat_map(|x| (0..choices[b]).map(move |y| (x, y))) {
                    let both = |row: &&Vec<usize>| row[a] == x && row[b] == y;
                    assert!(rows.iter().any(|row| both(&row)), "{a}={x} {b}={y}");
                }
            }
        }
        assert!(rows.iter().all(|row| row.iter().zip(&choices).all(|(own, of)| own < of)));
        // 35 are the least that have every choice of the two largest.
        assert!((35..=45).contains(&rows.len()), "{}", rows.len());
    }
}
