//! `tilewright inspect`: what a Laya checkpoint's folder holds, and what it lacks.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tilewright_models::laya::{Inspection, inspect};

use crate::units::{bytes, grouped};

/// Look at a Laya checkpoint: sizes, settings, special tokens, and why it would not load.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The checkpoint's folder
    dir: PathBuf,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand. A folder that would not load ends with exit code 1, after its description.
pub fn run(args: &Args) -> Result<()> {
    let found = inspect(&args.dir, None)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", to_json(&found))?;
    } else {
        write!(out, "{}", text(&found))?;
    }
    let n = found.problems.len();
    ensure!(
        found.is_whole(),
        "{} would not load: {n} problem{} listed above",
        args.dir.display(),
        if n == 1 { "" } else { "s" }
    );
    Ok(())
}

fn text(found: &Inspection) -> String {
    let mut s = String::new();
    let mut section = |title: &str, rows: Vec<(String, String)>| {
        if !rows.is_empty() {
            let _ = writeln!(s, "{title}");
            rows.iter().for_each(|(name, value)| {
                let _ = writeln!(s, "  {name:<34}{value}");
            });
        }
    };
    let row = |name: &str, value: String| (name.to_owned(), value);
    let files = found.files.iter().map(|f| row(f.path, f.bytes.map_or_else(|| "MISSING".to_owned(), bytes)));
    section("files", files.collect());
    if let Some(agent) = &found.agent {
        let by_options: Vec<String> =
            agent.temperature_by_options.iter().map(|(name, t)| format!("{name} {t}")).collect();
        section(
            "agent",
            vec![
                row("base encoder", agent.encoder.clone()),
                row("head layers", agent.head_layers.to_string()),
                row("row", format!("{} tokens, {} of them for the question", agent.max_len, agent.head_max_len)),
                row("option layout", agent.option_layout.name().to_owned()),
                row("action classes", agent.act_classes.to_string()),
                row("temperatures", agent.temperature.each_ref().map(Value::to_string).join(", ")),
                row("by number of options", if by_options.is_empty() { "none".into() } else { by_options.join(", ") }),
            ],
        );
    }
    if let Some(encoder) = &found.encoder {
        section(
            "encoder",
            vec![
                row("vocabulary", grouped(encoder.vocab_size as u64)),
                row(
                    "width",
                    format!("{}, {} heads, {} in the MLP", encoder.hidden, encoder.heads, encoder.intermediate),
                ),
                row("layers", encoder.layers.len().to_string()),
                row("window", format!("{} tokens", encoder.local_attention)),
                row("positions", grouped(encoder.max_positions as u64)),
            ],
        );
    }
    if found.tensors > 0 {
        let types: Vec<String> = found.dtypes.iter().map(|(name, n)| format!("{n} x {name}")).collect();
        let mut rows = vec![
            row("tensors", format!("{} ({})", found.tensors, types.join(", "))),
            row("parameters", grouped(found.parameters)),
        ];
        if found.renamed_tensors > 0 {
            rows.push(row("spelled as laya-mlx does", found.renamed_tensors.to_string()));
        }
        section("weights", rows);
    }
    section(
        "special tokens",
        found.special_tokens.iter().map(|t| row(t.role, format!("{} = {}", t.content, t.id))).collect(),
    );
    if found.is_whole() {
        s += "nothing is missing\n";
    } else {
        s += "problems\n";
        found.problems.iter().for_each(|p| s += &format!("  - {p}\n"));
    }
    s
}

fn to_json(found: &Inspection) -> Value {
    let files: Vec<Value> = found.files.iter().map(|f| json!({"path": f.path, "bytes": f.bytes})).collect();
    let tokens: Vec<Value> =
        found.special_tokens.iter().map(|t| json!({"role": t.role, "content": t.content, "id": t.id})).collect();
    let agent = found.agent.as_ref().map(|a| {
        json!({
            "encoder": a.encoder, "head_layers": a.head_layers, "max_len": a.max_len, "head_max_len": a.head_max_len,
            "act_classes": a.act_classes, "temperature": a.temperature, "temperature_by_options": a.temperature_by_options,
            "option_layout": a.option_layout.name(),
        })
    });
    let dtypes: serde_json::Map<String, Value> =
        found.dtypes.iter().map(|(name, n)| (name.clone(), json!(n))).collect();
    json!({
        "dir": found.dir.display().to_string(),
        "files": files,
        "agent": agent,
        "encoder": found.encoder.as_ref().map(|e| e.to_json()),
        "tensors": found.tensors,
        "parameters": found.parameters,
        "dtypes": dtypes,
        "renamed_tensors": found.renamed_tensors,
        "special_tokens": tokens,
        "problems": found.problems,
    })
}
