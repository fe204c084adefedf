//! Pairwise test cases: every two choices of different factors occur together in one case. This takes far fewer cases
//! than the full product and finds most faults, which involve two factors.
//!
//! Source: Cohen, Dalal, Fredman and Patton, "The AETG System: An Approach to Testing Based on Combinatorial Design"
//! (1997), without its random choices. Each row begins with the first uncovered pair and takes the choices that cover
//! the most.

use std::collections::BTreeSet;

/// Returns rows with one choice per factor, where factor i has `choices[i]` choices. Every pair of choices is in a row.
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
            // Each row breaks ties in favour of a different choice.
            let rotated = (0..choices[factor]).map(|i| (i + rows.len()) % choices[factor]);
            row[factor] = rotated.max_by_key(|choice| closes(*choice));
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
        // The two largest factors have 7 · 5 = 35 pairs, so no fewer rows are possible.
        assert!((35..=45).contains(&rows.len()), "{}", rows.len());
    }
}
