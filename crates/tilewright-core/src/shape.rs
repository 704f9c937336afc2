//! Dimensions of a tensor.

use std::fmt;
use std::ops::Deref;

/// The largest number of dimensions of a [`Shape`].
pub const MAX_RANK: usize = 6;

/// Up to [`MAX_RANK`] dimensions, row-major, kept inline so that shapes are `Copy` and never allocate.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// # Panics
    /// When there are more than [`MAX_RANK`] dimensions or their product exceeds `usize`.
    pub fn new(dims: &[usize]) -> Self {
        assert!(dims.len() <= MAX_RANK, "a shape has at most {MAX_RANK} dimensions, got {}", dims.len());
        let mut all = [1; MAX_RANK];
        all[..dims.len()].copy_from_slice(dims);
        assert!(
            dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).is_some(),
            "the element count of shape {dims:?} exceeds usize"
        );
        Shape { dims: all, rank: dims.len() as u8 }
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    /// The product of the dimensions; 1 for a scalar.
    pub fn numel(&self) -> usize {
        self.dims().iter().product()
    }

    /// The innermost dimension; 1 for a scalar.
    pub fn last(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// The shape seen as a matrix: `(product of all but the last, last)`.
    pub fn as_matrix(&self) -> (usize, usize) {
        let cols = self.last();
        let rows = self.dims().split_last().map_or(1, |(_, lead)| lead.iter().product());
        (rows, cols)
    }
}

impl Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        self.dims()
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape::new(dims)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape::new(&dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (i, d) in self.dims().iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrix_view_folds_the_leading_dimensions() {
        assert_eq!(Shape::new(&[4, 64, 768]).as_matrix(), (256, 768));
        assert_eq!(Shape::new(&[7]).as_matrix(), (1, 7));
        assert_eq!(Shape::new(&[]).as_matrix(), (1, 1));
        assert_eq!(Shape::new(&[3, 0]).as_matrix(), (3, 0));
    }

    #[test]
    fn displays_like_a_tuple() {
        assert_eq!(Shape::new(&[4, 64, 768]).to_string(), "(4, 64, 768)");
        assert_eq!(Shape::new(&[]).to_string(), "()");
    }

    #[test]
    fn equality_ignores_unused_slots() {
        assert_eq!(Shape::new(&[2, 3]), Shape::from([2, 3]));
        assert_ne!(Shape::new(&[2, 3]), Shape::new(&[2, 3, 1]));
    }

    #[test]
    #[should_panic(expected = "exceeds usize")]
    fn refuses_an_overflowing_element_count() {
        Shape::new(&[usize::MAX, 2]);
    }
}
