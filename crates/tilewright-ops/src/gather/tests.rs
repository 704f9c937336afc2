use proptest::prelude::*;

use super::*;
use crate::MappedFile;
use crate::testing::{self, FLOATS, Random, assert_close, devices, poisoned, random};

/// `(V, D, N)`.
const SHAPES: [(usize, usize, usize); 12] = [
    (1, 1, 1),
    (5, 1, 7),
    (3, 2, 17),
    (7, 33, 5),
    (11, 64, 1),
    (300, 767, 9),
    (50, 768, 65),
    (50_368, 3, 100),
    (9, 1024, 300),
    (4, 20_000, 3),
    (6, 13, 0),
    (6, 0, 4),
];

struct Case {
    table: Tensor,
    exact: Vec<f64>,
    index: Tensor,
    ids: Vec<i32>,
    out: Tensor,
}

impl Case {
    fn new(device: &Device, dtype: DType, (rows, width, n): (usize, usize, usize)) -> Self {
        let mut rng = Random::new((rows * width + n) as u64);
        let (table, exact) = random(device, dtype, &[rows, width], 1.0, &mut rng);
        let mut ids: Vec<i32> = (0..n).map(|_| rng.below(rows) as i32).collect();
        // The last row, and a row taken twice.
        if n > 2 {
            (ids[0], ids[n - 1]) = (rows as i32 - 1, ids[1]);
        }
        let index = Tensor::from_i32(device, &[n], &ids).unwrap();
        Case { table, exact, index, ids, out: poisoned(device, DType::F32, &[n, width]) }
    }

    fn args(&self) -> Forward<'_> {
        Forward { table: &self.table, index: &self.index, out: &self.out }
    }

    fn check(&self) {
        forward(self.out.device(), &self.args()).unwrap();
        let want = reference::forward(self.table.shape().last(), &self.exact, &self.ids);
        assert_close("out", &self.out, &want, 0.0, 0.0);
    }
}

/// The table of a case in a file, `lead` bytes behind its start.
fn in_a_file(table: &Tensor, lead: usize, name: &str) -> Tensor {
    let mut bytes = vec![0xFF; lead + table.bytes()];
    table.read_bytes(0, &mut bytes[lead..]).unwrap();
    let path = std::env::temp_dir().join(format!("tilewright-gather-{}-{name}", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    let file = MappedFile::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    Tensor::mapped(table.device(), &file, lead, table.dtype(), &table.shape()).unwrap()
}

#[test]
fn rows_are_exactly_those_of_the_table() {
    for device in devices() {
        for dtype in FLOATS {
            for shape in SHAPES {
                Case::new(&device, dtype, shape).check();
            }
        }
    }
}

#[test]
fn rows_of_a_mapped_table_are_the_same() {
    for device in testing::cpus() {
        for dtype in FLOATS {
            for shape in [(1, 1, 1), (7, 33, 5), (300, 767, 9), (50, 768, 65)] {
                let mut case = Case::new(&device, dtype, shape);
                // Eight bytes are all that the format of the weights promises.
                case.table = in_a_file(&case.table, 8, &format!("{dtype}-{}", shape.1));
                case.check();
            }
        }
    }
}

#[test]
fn special_values_keep_their_bits() {
    let device = Device::cpu_with_threads(1);
    let table = Tensor::zeros(&device, DType::F32, &[1, 40]).unwrap();
    let bits: Vec<u8> = (0..160).map(|i| if i % 4 == 3 { 0x7F } else { 0x80 + (i % 100) as u8 }).collect();
    table.write_bytes(0, &bits).unwrap();
    let index = Tensor::from_i32(&device, &[2], &[0, 0]).unwrap();
    let out = poisoned(&device, DType::F32, &[2, 40]);
    forward(&device, &Forward { table: &table, index: &index, out: &out }).unwrap();
    let mut got = vec![0; 320];
    out.read_bytes(0, &mut got).unwrap();
    assert!(got[..160] == bits && got[160..] == bits);
}

#[test]
fn an_index_outside_the_table_is_named_and_nothing_is_written() {
    for device in devices() {
        for bad in [-1, 7, i32::MAX, i32::MIN] {
            let mut case = Case::new(&device, DType::F16, (7, 300, 60));
            case.ids[57] = bad;
            case.index.write_i32(&case.ids).unwrap();
            let error = forward(&device, &case.args()).unwrap_err();
            assert!(matches!(error, Error::Argument { .. }));
            let message = error.to_string();
            let words = ["gather.forward", "`index`", &format!("holds {bad} at 57"), "0..7"];
            assert!(words.iter().all(|w| message.contains(w)), "{message}");
            assert!(case.out.read_f32().unwrap().iter().all(|v| v.is_nan()));
        }
    }
}

#[test]
fn an_empty_table_has_no_valid_index() {
    let device = Device::cpu_with_threads(1);
    let table = Tensor::zeros(&device, DType::F32, &[0, 4]).unwrap();
    let out = poisoned(&device, DType::F32, &[1, 4]);
    let index = Tensor::from_i32(&device, &[1], &[0]).unwrap();
    forward(&device, &Forward { table: &table, index: &index, out: &out }).unwrap_err();
}

#[test]
fn unaligned_tensors_give_the_same_values() {
    for device in devices() {
        for dtype in FLOATS {
            let mut case = Case::new(&device, dtype, (9, 67, 11));
            case.table = testing::unaligned(&case.table);
            case.out = testing::unaligned(&case.out);
            case.check();
        }
    }
}

#[test]
fn refuses_what_the_contract_does_not_allow() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, (7, 8, 5));
    let elsewhere = Case::new(&Device::cpu_with_threads(1), DType::F32, (7, 8, 5));
    let fails = |args: Forward<'_>, words: &[&str]| {
        let message = forward(&device, &args).unwrap_err().to_string();
        assert!(message.contains("gather.forward") && words.iter().all(|w| message.contains(w)), "{message}");
    };
    let half = poisoned(&device, DType::BF16, &[5, 8]);
    fails(Forward { out: &half, ..case.args() }, &["`out`", "bf16", "f32"]);
    let short = poisoned(&device, DType::F32, &[4, 8]);
    fails(Forward { out: &short, ..case.args() }, &["`out`", "(4, 8)", "(5, 8)"]);
    fails(Forward { index: &case.out, ..case.args() }, &["`index`", "i32"]);
    let square = case.index.view(&[5, 1]).unwrap();
    fails(Forward { index: &square, ..case.args() }, &["`index`"]);
    let flat = case.table.view(&[56]).unwrap();
    fails(Forward { table: &flat, ..case.args() }, &["`table`", "(V, D)"]);
    fails(Forward { table: &elsewhere.table, ..case.args() }, &["`table`", "lives on"]);
    let inside = case.table.slice(8, &[5, 8]).unwrap();
    fails(Forward { out: &inside, ..case.args() }, &["`out`", "`table`", "overlaps"]);
    let mapped = in_a_file(&case.out, 0, "output");
    fails(Forward { out: &mapped, ..case.args() }, &["`out`", "read-only"]);
}

#[test]
fn the_null_device_records_the_rows_that_would_move() {
    let device = Device::null(2);
    let case = Case::new(&device, DType::F16, (50_000, 768, 65));
    forward(&device, &case.args()).unwrap();
    let Device::Null(null) = &device else { unreachable!() };
    let launches = null.take_launches();
    assert_eq!((launches[0].op, launches[0].flops), ("gather.forward", 0));
    assert_eq!(launches[0].bytes, 65 * (768 * (2 + 4) + 4));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_matches_the_reference(
        rows in 1usize..60, width in 1usize..900, n in 0usize..90, dtype in 0usize..3, threads in 1usize..4,
    ) {
        Case::new(&Device::cpu_with_threads(threads), FLOATS[dtype], (rows, width, n)).check();
    }
}
