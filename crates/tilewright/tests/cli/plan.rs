use super::tilewright;

fn plan(args: &[&str]) -> serde_json::Value {
    serde_json::from_str(&tilewright(&[&["plan", "--json", "--threads", "2"], args].concat()).ok()).unwrap()
}

fn peak(args: &[&str]) -> u64 {
    plan(args)["peak_bytes"].as_u64().unwrap()
}

#[test]
fn the_sections_add_up_to_the_peak_and_the_buffers_to_their_section() {
    let plan = plan(&["--model", "d6", "--seq-len", "64"]);
    let sum =
        |list: &serde_json::Value| list.as_array().unwrap().iter().map(|x| x["bytes"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(sum(&plan["sections"]), plan["peak_bytes"].as_u64().unwrap());
    let parameters = &plan["sections"][0];
    assert_eq!(parameters["name"], "parameters");
    assert_eq!(sum(&parameters["buffers"]), parameters["bytes"].as_u64().unwrap());
    assert_eq!(plan["parameters"], 30_357_504);
}

#[test]
fn recompute_storage_and_evaluation_shrink_the_plan() {
    let base = ["--model", "d12", "--seq-len", "256"];
    let with = |more: &[&str]| peak(&[&base, more].concat());
    let (none, gelu, both) = (with(&["--recompute", "0"]), with(&[]), with(&["--recompute", "2"]));
    assert!(none > gelu && gelu > both, "{none} {gelu} {both}");
    let (bf16, no_masters) = (with(&["--dtype", "bf16"]), with(&["--dtype", "bf16", "--no-masters"]));
    assert!(bf16 < gelu && no_masters < bf16, "{gelu} {bf16} {no_masters}");
    assert!(with(&["--eval"]) < gelu / 2);
}

#[test]
fn the_largest_batch_fits_and_one_more_does_not() {
    let base = ["--model", "d6", "--seq-len", "128"];
    let found = plan(&[&base[..], &["--memory", "2GiB"]].concat());
    let batch = found["batch"].as_u64().unwrap();
    assert!(found["peak_bytes"].as_u64().unwrap() <= 2 << 30);
    assert!(peak(&[&base[..], &["--batch", &(batch + 1).to_string()]].concat()) > 2 << 30);
}

#[test]
fn too_little_memory_says_what_would_be_needed_and_what_to_try() {
    let error = tilewright(&["plan", "--memory", "1GiB"]).failed();
    assert!(error.contains("needs") && error.contains("--recompute 2"), "{error}");
}

#[test]
fn the_table_names_model_parts_and_verdict() {
    let table = tilewright(&["plan", "--model", "gpt3:c768", "--seq-len", "16", "--buffers"]).ok();
    for word in ["12 layers", "parameters", "gradients", "activations", "workspace", "device scratch", "peak", "  qkvw"]
    {
        assert!(table.contains(word), "`{word}` is missing from\n{table}");
    }
}

#[test]
fn a_size_of_ones_own_and_its_vocabulary_can_be_planned() {
    let own = ["--layers", "4", "--heads", "4", "--channels", "128", "--seq-len", "64", "--vocab-size", "1000"];
    let (l, c, t, padded) = (4, 128, 64, 1024);
    assert_eq!(plan(&own)["parameters"], padded * c + t * c + l * (12 * c * c + 13 * c) + 2 * c);
    let same_as_d6 = ["--layers", "6", "--heads", "6", "--channels", "384", "--seq-len", "1024"];
    assert_eq!(peak(&same_as_d6), peak(&["--model", "d6"]));
    assert!(tilewright(&["plan", "--layers", "4"]).refused().contains("--heads"));
    assert!(tilewright(&[&["plan"], &own[..], &["--model", "d6"]].concat()).refused().contains("--model"));
}

#[test]
fn the_sampling_cache_is_planned_unless_left_out() {
    let base = ["--model", "d6", "--seq-len", "64"];
    let without = peak(&[&base[..], &["--decode-len", "0"]].concat());
    let (l, t, c) = (6, 1024, 384);
    assert!(peak(&base) >= without + 2 * l * t * c * 4, "keys and values of all layers");
}

#[test]
fn a_checkpoint_can_be_planned_and_a_false_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.bin");
    crate::convert::write_tiny(&path, tilewright_core::DType::F32);
    let found = plan(&["--model", path.to_str().unwrap()]);
    assert_eq!(found["seq_len"], crate::convert::TINY.max_seq_len);
    assert_eq!(found["parameters"], crate::convert::TINY.parameter_count());
    std::fs::write(&path, [7; 2000]).unwrap();
    assert!(tilewright(&["plan", "--model", path.to_str().unwrap()]).failed().contains("m.bin"));
}

#[test]
fn wrong_models_lengths_and_sizes_are_refused() {
    assert!(tilewright(&["plan", "--model", "d13"]).failed().contains("d12"));
    assert!(tilewright(&["plan", "--seq-len", "1025"]).failed().contains("1024"));
    assert!(tilewright(&["plan", "--batch", "0"]).failed().contains("batch 0"));
    assert!(tilewright(&["plan", "--recompute", "3"]).failed().contains("recompute"));
    assert!(tilewright(&["plan", "--memory", "lots"]).refused().contains("24GiB"));
    assert!(tilewright(&["plan", "--memory", "1GiB", "--batch", "2"]).refused().contains("--batch"));
    assert!(tilewright(&["plan", "--dtype", "int4"]).refused().contains("bf16"));
}

#[test]
fn a_plan_names_its_device_and_one_that_is_not_there_is_refused() {
    assert_eq!(plan(&["--model", "d6"])["device"], "2 threads");
    let message = tilewright(&["plan", "--device", "cuda:77"]).failed();
    assert!(message.contains("cuda") || message.contains("CUDA"), "{message}");
}
