//! Sizes of the kernel for the matrix units: which there are, which fit a device, which a product gets.

use crate::DType;
use crate::runtime::gpu::{Capabilities, MatrixTile};

/// How a group divides its part of a product. All of it is part of a kernel's identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Blocks {
    /// Rows and columns of a group, and the terms of the sum that it takes at a time.
    pub(crate) group: [usize; 3],
    /// Rows and columns of a plane.
    pub(crate) plane: [usize; 2],
    /// Elements behind each line of a slice, so that lines start in different banks.
    pub(crate) pad: usize,
    /// Rows of groups that are walked together, column by column: what runs at one time shares lines of both factors.
    pub(crate) band: usize,
    /// Planes that share their part of a product, each with its part of a slice's terms: few rows make few groups, whose time is that of a loop.
    pub(crate) split: usize,
    /// The next slice is read behind a branch, where a driver leaves the reads. It moves others before the barrier, two slices ahead: better where
    /// it has registers for both.
    pub(crate) guarded: bool,
}

impl Blocks {
    pub(crate) const fn new(group: [usize; 3], plane: [usize; 2]) -> Self {
        Blocks { group, plane, pad: 8, band: 8, split: 1, guarded: true }
    }

    /// Planes of a group.
    pub(crate) fn planes(&self) -> usize {
        (self.group[0] / self.plane[0]) * (self.group[1] / self.plane[1]) * self.split
    }

    /// Lines and elements a line of an operand's slice; `rows` are those of the product.
    pub(crate) fn lines(&self, operand: usize, along: bool) -> [usize; 2] {
        let (rows, depth) = (self.group[operand], self.group[2]);
        if along { [rows, depth] } else { [depth, rows] }
    }

    /// Numbers of a line of the strip that a plane's sums pass through on their way to the epilogue; eight more than its columns, for the banks.
    pub(crate) fn strip_line(&self) -> usize {
        self.plane[1] + 8
    }

    /// Bytes of shared memory: the slices, and a strip of sums for each plane.
    pub(crate) fn shared_bytes(&self, tile: &MatrixTile, along: [bool; 2]) -> usize {
        let slice = |operand: usize| {
            let [lines, length] = self.lines(operand, along[operand]);
            lines * (length + self.pad) * 2
        };
        slice(0) + slice(1) + self.planes() * tile.m * self.strip_line() * 4
    }

    /// Whether a device with this tile and planes of `plane` units runs it.
    pub(crate) fn fits(&self, c: &Capabilities, tile: &MatrixTile, plane: usize, along: [bool; 2]) -> bool {
        let [m, n, k] = self.group;
        let units = self.planes() * plane;
        let parts = [(m, self.plane[0]), (n, self.plane[1]), (self.plane[0], tile.m), (self.plane[1], tile.n)];
        parts
            .iter()
            .chain(&[(k, tile.k * self.split), (m * k, 8 * units), (n * k, 8 * units)])
            .all(|(a, b)| a.is_multiple_of(*b))
            && [m, n, k, self.pad, tile.m, tile.n, tile.k].iter().all(|x| x.is_multiple_of(8))
            && (tile.m * tile.n).is_multiple_of(plane)
            && units <= c.group
            && self.shared_bytes(tile, along) <= c.shared_bytes
    }
}

/// A tile of the matrix units and the size of a plane, for factors of one type.
pub(crate) fn tile(c: &Capabilities, factors: DType) -> Option<(MatrixTile, usize)> {
    let [least, most] = c.subgroup;
    // The kernels read 16-bit elements as integers too.
    if least != most || !c.bf16 || (factors == DType::BF16 && !c.bf16_native) {
        return None;
    }
    let fits = |t: &&MatrixTile| t.factors == factors && [t.m, t.n, t.k].iter().all(|x| [8, 16].contains(x));
    c.tiles.iter().filter(fits).max_by_key(|t| (t.m * t.n * t.k, t.m)).map(|t| (*t, most))
}

/// From the largest to the smallest, for a tile and a plane; the last are for few rows.
pub(crate) fn table(tile: &MatrixTile, plane: usize) -> Vec<Blocks> {
    if is_large(tile, plane) {
        return vec![
            Blocks::new([128, 128, 32], [64, 64]),
            Blocks { guarded: false, ..Blocks::new([128, 96, 32], [64, 48]) },
            Blocks::new([96, 96, 32], [48, 48]),
            Blocks::new([64, 64, 64], [32, 32]),
            Blocks { split: 4, guarded: false, ..Blocks::new([32, 32, 128], [16, 32]) },
        ];
    }
    // 32 sums a unit at most where a plane has 32 units and a tile 8 x 8.
    let edge = |side: usize| if plane >= 32 { 32usize.max(side) } else { 2 * side };
    let [rows, columns] = [edge(tile.m), edge(tile.n)];
    vec![
        Blocks::new([2 * rows, 2 * columns, 32], [rows, columns]),
        Blocks::new([2 * tile.m, 2 * tile.n, 64], [tile.m, tile.n]),
    ]
}

/// Rows up to which the blocks for few rows are taken: with more, each of them reads all lines of the other factor again.
const FEW_ROWS: usize = 128;

/// Groups that a large GPU runs at one time, two on each of its multiprocessors.
const SLOTS: usize = 264;

/// What a multiprocessor takes for one group alone, of what it takes for two at one time: an H200 makes 160 TFLOP/s with one and 251 with two.
const ALONE: f64 = 0.78;

/// Seconds that a large GPU takes for a term of one of the sums of its groups, where fragments cost nothing.
const TERM: f64 = 0.91e-12;

/// Seconds of a launch that adds parts, and of each byte that it and the product before it move for that.
const JOIN: [f64; 2] = [5e-6, 1.0 / 3e12];

/// Seconds of a product in `parts` of `terms` terms: rounds of groups, and the area of each. What a fragment brings from shared memory serves fewer
/// products in a smaller plane.
fn seconds(b: &Blocks, [m, n]: [usize; 2], terms: usize, parts: usize) -> f64 {
    let groups = m.div_ceil(b.group[0]) * n.div_ceil(b.group[1]) * parts;
    let rounds = if groups <= SLOTS / 2 { ALONE } else { groups.div_ceil(SLOTS) as f64 };
    let area = (b.group[0] * b.group[1]) as f64;
    let [rows, columns] = b.plane.map(|edge| edge as f64);
    rounds * area * (1.0 + 32.0 * (rows + columns) / (rows * columns)) * terms as f64 * TERM
}

/// The blocks for a product, if any of the table's fit.
pub(crate) fn choose(
    c: &Capabilities,
    tile: &MatrixTile,
    plane: usize,
    along: [bool; 2],
    [m, n]: [usize; 2],
) -> Option<Blocks> {
    let all: Vec<_> = table(tile, plane).into_iter().filter(|b| b.fits(c, tile, plane, along)).collect();
    let few = *all.last()?;
    let cost = |b: &&Blocks| seconds(b, [m, n], 1, 1);
    let best = all[..all.len() - 1].iter().min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(&few);
    let groups = m.div_ceil(best.group[0]) * n.div_ceil(best.group[1]);
    Some(if m <= FEW_ROWS && groups < SLOTS { few } else { *best })
}

/// The blocks for a product in parts, and the terms of each: where there are so few groups that a large GPU would idle, and that costs more than to write
/// the parts, at most `bytes` bytes, and add them.
pub(crate) fn parts(
    c: &Capabilities,
    tile: &MatrixTile,
    plane: usize,
    along: [bool; 2],
    [m, n, k]: [usize; 3],
    bytes: usize,
) -> Option<(Blocks, usize)> {
    const MOST: usize = 8;
    // The costs are those of the only large GPU that was measured.
    if !is_large(tile, plane) || m <= FEW_ROWS {
        return None;
    }
    let whole = choose(c, tile, plane, along, [m, n])?;
    let mut best = (seconds(&whole, [m, n], k, 1), None);
    let all = table(tile, plane);
    for b in all[..all.len() - 1].iter().filter(|b| b.fits(c, tile, plane, along)) {
        for parts in 2..=MOST.min(bytes / (m * n * size_of::<f32>()).max(1)) {
            let terms = k.div_ceil(parts).next_multiple_of(b.group[2]);
            let parts = k.div_ceil(terms);
            let moved = ((parts + 1) * m * n * size_of::<f32>()) as f64;
            let took = seconds(b, [m, n], terms, parts) + JOIN[0] + moved * JOIN[1];
            if parts > 1 && took < best.0 {
                best = (took, Some((*b, terms)));
            }
        }
    }
    best.1
}

/// Whether it is a GPU with tiles and planes such as NVIDIA's.
fn is_large(tile: &MatrixTile, plane: usize) -> bool {
    [tile.m, tile.n, tile.k] == [16; 3] && plane == 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(side: usize, plane: usize, shared_bytes: usize, group: usize) -> (Capabilities, MatrixTile) {
        let tile = MatrixTile { factors: DType::F16, m: side, n: side, k: side };
        let c = Capabilities {
            compiler: "wgpu<spirv>",
            subgroup: [plane; 2],
            f16: true,
            bf16: true,
            bf16_native: false,
            tiles: vec![tile, MatrixTile { factors: DType::BF16, ..tile }],
            shared_bytes,
            group,
            groups: [65_535; 3],
            bindings: 30,
            buffer_bytes: 1 << 30,
            alignment: 1,
            memory_bytes: None,
        };
        (c, tile)
    }

    const ALONG: [[bool; 2]; 3] = [[true, true], [true, false], [false, false]];

    #[test]
    fn every_block_of_the_table_fits_what_it_is_for_in_all_three_forms() {
        // An NVIDIA GPU through Vulkan, an Apple GPU, software, an AMD GPU.
        for (side, plane, shared, group) in
            [(16, 32, 48 << 10, 1024), (8, 32, 32 << 10, 1024), (8, 8, 32 << 10, 1024), (16, 64, 64 << 10, 1024)]
        {
            let (c, tile) = device(side, plane, shared, group);
            for blocks in table(&tile, plane) {
                for along in ALONG {
                    assert!(blocks.fits(&c, &tile, plane, along), "{side} {plane} {blocks:?} {along:?}");
                }
            }
        }
    }

    #[test]
    fn an_apple_gpu_keeps_at_most_32_sums_a_unit() {
        let (_, tile) = device(8, 32, 32 << 10, 1024);
        for blocks in table(&tile, 32) {
            assert!(blocks.plane[0] * blocks.plane[1] / 32 <= 32, "{blocks:?}");
        }
    }

    #[test]
    fn few_groups_are_made_more_by_smaller_blocks() {
        let (c, tile) = device(16, 32, 48 << 10, 1024);
        let size = |m, n| choose(&c, &tile, 32, [true, true], [m, n]).unwrap().group;
        assert_eq!(size(8192, 8192), [128, 128, 32]);
        assert_eq!(size(4096, 3072), [128, 128, 32]);
        assert_eq!(size(4096, 768), [128, 96, 32]);
        assert_eq!(size(3072, 768), [96, 96, 32]);
        assert_eq!(size(768, 768), [64, 64, 64]);
        assert_eq!(size(64, 1024), [32, 32, 128]);
    }

    #[test]
    fn few_groups_of_many_terms_are_made_more_by_parts() {
        let (c, tile) = device(16, 32, 48 << 10, 1024);
        let parts = |size: [usize; 3]| parts(&c, &tile, 32, [false, false], size, 16 << 20);
        for size in [[768, 768, 4096], [2304, 768, 4096], [1024, 1024, 4096]] {
            let (blocks, terms) = parts(size).unwrap();
            let groups = size[0].div_ceil(blocks.group[0]) * size[1].div_ceil(blocks.group[1]);
            let parts = size[2].div_ceil(terms);
            assert!(parts > 1 && terms.is_multiple_of(blocks.group[2]) && (parts - 1) * terms < size[2], "{size:?}");
            assert!(groups * parts <= SLOTS && groups * parts > SLOTS / 2, "{size:?} {blocks:?} {terms}");
            assert!(parts * size[0] * size[1] * 4 <= 16 << 20);
        }
        // Enough groups, few terms, no room.
        assert_eq!(parts([3072, 3072, 4096]), None);
        assert_eq!(parts([768, 768, 64]), None);
        assert_eq!(super::parts(&c, &tile, 32, [false, false], [768, 768, 4096], 1 << 20), None);
        let (c, tile) = device(8, 32, 32 << 10, 1024);
        assert_eq!(super::parts(&c, &tile, 32, [false, false], [768, 768, 4096], 16 << 20), None);
    }

    #[test]
    fn many_rows_never_get_the_blocks_for_few_however_few_groups_they_make() {
        let (c, tile) = device(16, 32, 48 << 10, 1024);
        let size = |m, n| choose(&c, &tile, 32, [false, false], [m, n]).unwrap().group;
        // A part of the vocabulary's gradient, a short batch's products.
        assert_eq!(size(1024, 768), [64, 64, 64]);
        assert_eq!(size(256, 768), [64, 64, 64]);
        assert_eq!(size(129, 64), [64, 64, 64]);
        assert_eq!(size(128, 1024), [32, 32, 128]);
    }

    #[test]
    fn blocks_that_do_not_divide_or_do_not_fit_are_refused() {
        let (c, tile) = device(16, 32, 48 << 10, 1024);
        let fits = |b: Blocks| b.fits(&c, &tile, 32, [true, true]);
        let good = Blocks::new([128, 128, 32], [64, 64]);
        assert!(fits(good));
        assert!(!fits(Blocks { group: [128, 128, 128], ..good }), "shared memory");
        assert!(!fits(Blocks { group: [128, 96, 32], ..good }), "planes");
        assert!(!fits(Blocks { plane: [24, 64], ..good }), "fragments");
        assert!(!fits(Blocks { pad: 4, ..good }), "lines that do not start at multiples of 16 bytes");
        assert!(!fits(Blocks { plane: [16, 16], ..good }), "units of a group");
    }

    #[test]
    fn devices_without_planes_of_one_size_or_without_the_type_have_no_tile() {
        let (c, tile) = device(16, 32, 48 << 10, 1024);
        assert_eq!(super::tile(&c, DType::F16), Some((tile, 32)));
        assert_eq!(super::tile(&c, DType::BF16), None);
        assert_eq!(super::tile(&c, DType::F32), None);
        assert_eq!(super::tile(&Capabilities { subgroup: [8, 32], ..c.clone() }, DType::F16), None);
        let native = Capabilities { bf16_native: true, ..c };
        assert_eq!(super::tile(&native, DType::BF16).unwrap().0.factors, DType::BF16);
    }
}
