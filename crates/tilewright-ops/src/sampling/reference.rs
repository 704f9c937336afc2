//! The formulas in f64.

/// Probabilities of a row: softmax of the `top_k` largest of the first `vocab` logits (the first of equals; 0 is all), 0 elsewhere.
pub(crate) fn probabilities(logits: &[f64], vocab: usize, temperature: f64, top_k: usize) -> Vec<f64> {
    let mut order: Vec<usize> = (0..vocab).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let kept = &order[..if temperature == 0.0 { 1 } else { vocab.min(if top_k == 0 { vocab } else { top_k }) }];
    let largest = logits[order[0]];
    let weight = |i: usize| if temperature == 0.0 { 1.0 } else { ((logits[i] - largest) / temperature).exp() };
    let sum: f64 = kept.iter().map(|&i| weight(i)).sum();
    let mut p = vec![0.0; logits.len()];
    for &i in kept {
        p[i] = weight(i) / sum;
    }
    p
}

/// The cumulative probabilities before and up to `index`: a draw of `index` is right for coins between them.
pub(crate) fn interval(p: &[f64], index: usize) -> (f64, f64) {
    let before: f64 = p[..index].iter().sum();
    (before, before + p[index])
}
