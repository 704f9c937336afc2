//! The reference vectors of llm.c's arithmetic (`data/vectors.txt`).

use tilewright_core::rng::{Mt19937, XorShift, noise2d};

const VECTORS: &str = include_str!("data/vectors.txt");

/// The numbers of the line that starts with `head`.
fn numbers<T: std::str::FromStr>(head: &str) -> Vec<T> {
    let line = VECTORS.lines().find_map(|l| l.strip_prefix(head)).unwrap_or_else(|| panic!("no line `{head}`"));
    line.split_whitespace().map(|w| w.parse().ok().unwrap_or_else(|| panic!("`{w}` in line `{head}`"))).collect()
}

fn normals(n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; n];
    Mt19937::new(42).normal_fill(&mut out, 0.0, 1.0);
    out
}

#[test]
fn mt19937_draws_equal_the_vectors() {
    for seed in [42, 1337] {
        let mut rng = Mt19937::new(seed);
        for want in numbers::<u32>(&format!("mt({seed}) u32:")) {
            assert_eq!(rng.random_u32(), want, "seed {seed}");
        }
    }
}

/// Bit equality with glibc; elsewhere the C library's last bit is its own.
fn assert_normals_equal(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let slack = if cfg!(all(target_os = "linux", target_env = "gnu")) { 0 } else { 2 };
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert!(a.to_bits().abs_diff(b.to_bits()) <= slack, "value {i}: {a} is not {b}");
    }
}

#[test]
fn normal_fill_of_16_equals_the_vectors() {
    assert_normals_equal(&normals(16), &numbers("mt(42) normal16:"));
}

#[test]
fn normal_fill_below_16_draws_doubles_and_equals_the_vectors() {
    let want: Vec<f32> = numbers("mt(42) normal8:");
    assert_normals_equal(&normals(8), &want);
    // An odd count drops the spare value.
    assert_normals_equal(&normals(7), &want[..7]);
}

#[test]
fn shuffles_equal_the_vectors() {
    let mut seen = 0;
    for line in VECTORS.lines().filter(|l| l.starts_with("shuffle seed ")) {
        let n: Vec<i64> =
            line.split(|c: char| !c.is_ascii_digit()).filter(|w| !w.is_empty()).map(|w| w.parse().unwrap()).collect();
        // seed, n, the 8 of `first8`, eight values, the checksum, the 32 of `u32`, the next draw.
        let (seed, count, first, sum, next) = (n[0] as u32, n[1] as usize, &n[3..11], n[11], n[13] as u32);
        let mut rng = Mt19937::new(seed);
        let order = rng.permutation(count);
        assert!(order.iter().map(|&x| i64::from(x)).take(8).eq(first.iter().copied()), "{line}");
        assert_eq!(order.iter().zip(1i64..).map(|(&p, i)| i * i64::from(p)).sum::<i64>(), sum, "{line}");
        assert_eq!(rng.random_u32(), next, "{line}");
        seen += 1;
    }
    assert_eq!(seen, 4);
}

#[test]
fn xorshift_equals_the_vectors() {
    let mut rng = XorShift::new(1337);
    for want in numbers::<f32>("xorshift*(1337) f32:") {
        assert_eq!(rng.random_f32(), want);
    }
    let mut rng = XorShift::new(13_371_337);
    for want in numbers::<u32>("xorshift*(13371337) u32:") {
        assert_eq!(rng.random_u32(), want);
    }
}

#[test]
fn squirrel_noise_equals_the_vectors() {
    let cases = numbers::<String>("noise2d (x,y,seed):");
    assert_eq!(cases.len(), 5);
    for case in cases {
        let n: Vec<u32> =
            case.split(|c: char| !c.is_ascii_digit()).filter(|w| !w.is_empty()).map(|w| w.parse().unwrap()).collect();
        assert_eq!(noise2d(n[0], n[1], n[2]), n[3], "{case}");
    }
}

#[test]
fn the_generator_record_has_the_vectors_size() {
    assert!(VECTORS.contains(&format!("sizeof(mt19937_state)={}", tilewright_core::rng::MT_RECORD_BYTES)));
    assert_eq!(Mt19937::new(42).to_record().len(), 2520);
}

/// Draws every tensor of llm.c's d12 initialisation; the sums come from the golden set's README.
#[test]
fn d12_initialisation_has_the_golden_sums() {
    use tilewright_core::gpt2::{Gpt2Config, PARAMS};
    let config = Gpt2Config::from_descriptor("d12").unwrap();
    let mut rng = Mt19937::new(42);
    let (mut sum, mut squares, mut first) = (0.0f64, 0.0f64, Vec::new());
    let mut draw = |n: usize, std: f32, keep: &mut Vec<f32>| {
        let mut out = vec![0.0; n];
        rng.normal_fill(&mut out, 0.0, std);
        for &x in &out {
            sum += f64::from(x);
            squares += f64::from(x) * f64::from(x);
        }
        *keep = out;
    };
    let mut values = Vec::new();
    let projection = 0.02 / (2.0 * config.layers as f32).sqrt();
    for layer in 0..config.layers {
        for (i, p) in PARAMS.iter().enumerate() {
            match p.name {
                "wte" if layer == 0 => {
                    draw(config.vocab_size * config.channels, 0.02, &mut values);
                    first = values[..4].to_vec();
                }
                "wpe" if layer == 0 => draw(config.param_numel(i), 0.02, &mut values),
                "qkvw" | "fcw" => draw(config.param_numel(i) / config.layers, 0.02, &mut values),
                "attprojw" | "fcprojw" => draw(config.param_numel(i) / config.layers, projection, &mut values),
                _ => {}
            }
        }
    }
    let ones = (2 * config.layers + 1) * config.channels;
    sum += ones as f64;
    squares += ones as f64;
    assert!((sum - 19_363.295_2).abs() < 1e-4, "sum {sum}");
    assert!((squares - 55_361.550_6).abs() < 1e-4, "sum of squares {squares}");
    for (got, want) in first.into_iter().zip([0.038_538_299_5, 0.029_745_683_1, 0.018_014_343_5, -0.042_110_428_2]) {
        assert!((f64::from(got) - want).abs() < 5e-9, "{got} is not {want}");
    }
}
