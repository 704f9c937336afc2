//! Claims: published numbers, each held to a committed record. A claim that its record no longer carries fails the check.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tilewright_core::{Error, Result};

use crate::record::{Kind, Measure, Record, Status};
use crate::summary::summarise;

/// The claims file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claims {
    /// The claims.
    #[serde(default)]
    pub claims: Vec<Claim>,
}

/// One claim.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// A short name.
    pub id: String,
    /// What is said, as it stands in documents.
    pub says: String,
    /// Its record, relative to the claims file; none while the claim is open: wished for, not measured, and not to be said.
    pub record: Option<PathBuf>,
    /// The plan of that record.
    pub plan: String,
    /// The case.
    pub case: String,
    /// The arm.
    pub arm: String,
    /// What it is held against.
    pub baseline: String,
    /// What is compared.
    #[serde(default)]
    pub measure: Measure,
    /// The low end of the ratio's interval must not be below this.
    pub at_least: Option<f64>,
    /// The high end must not be above this.
    pub at_most: Option<f64>,
}

/// How a claim stands.
#[derive(Debug, Clone, PartialEq)]
pub enum Standing {
    /// The record carries it; the words say by how much.
    Holds(String),
    /// It does not; why.
    Fails(String),
    /// Not measured.
    Open,
}

/// Reads a claims file.
pub fn read(path: &Path) -> Result<Claims> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let claims: Claims = toml::from_str(&text).map_err(|e| {
        Error::config(format!("{}: {}", path.display(), e.to_string().trim_end()), "see bench/claims.toml for the keys")
    })?;
    for (i, claim) in claims.claims.iter().enumerate() {
        if claim.at_least.is_none() && claim.at_most.is_none() {
            return Err(Error::config(format!("claim `{}` has no bound", claim.id), "give `at_least` or `at_most`"));
        }
        if claims.claims[..i].iter().any(|c| c.id == claim.id) {
            return Err(Error::config(format!("claim `{}` stands twice", claim.id), "give each its own id"));
        }
    }
    Ok(claims)
}

/// Holds a claim against its record, whose statistics are made anew from its samples.
pub fn check(claim: &Claim, folder: &Path) -> Standing {
    let Some(record) = &claim.record else { return Standing::Open };
    match Record::read(&folder.join(record)) {
        Ok(record) => hold(claim, &record),
        Err(error) => Standing::Fails(error.to_string()),
    }
}

fn hold(claim: &Claim, record: &Record) -> Standing {
    let fails = |why: String| Standing::Fails(why);
    if record.plan != claim.plan {
        return fails(format!("the record is of plan `{}`, not `{}`", record.plan, claim.plan));
    }
    if record.kind != Kind::Confirm {
        return fails("the record is a screen, from which nothing may be claimed".to_owned());
    }
    if !matches!(record.status, Status::Ok | Status::Error) {
        return fails("the record is not complete".to_owned());
    }
    if let Some(forced) = record.forced.first() {
        return fails(format!("the session was forced although {forced}"));
    }
    let summary = summarise(record);
    let found = summary.comparisons.iter().find(|c| {
        (c.case.as_str(), c.arm.as_str(), c.baseline.as_str(), c.measure)
            == (claim.case.as_str(), claim.arm.as_str(), claim.baseline.as_str(), claim.measure)
    });
    let Some(c) = found else {
        return fails(format!(
            "the record compares no `{}` with `{}` in case `{}`",
            claim.arm, claim.baseline, claim.case
        ));
    };
    let Some(p) = c.paired.filter(|_| c.verdict != crate::summary::Verdict::NotComparable) else {
        return fails(format!("not comparable: {}", c.reason.as_deref().unwrap_or("no ratio")));
    };
    let words = format!("{:.3} ({:.3} to {:.3}, n {})", p.ratio, p.ci95[0], p.ci95[1], p.n);
    if let Some(bound) = claim.at_least {
        if p.ci95[0] < bound {
            return fails(format!("{words} reaches below {bound}"));
        }
        // A bound above 1 says that there is a difference; it must be one that the session could see.
        if bound > 1.0 && c.verdict != crate::summary::Verdict::Faster {
            return fails(format!("{words} is `{}`", c.verdict.words(c.measure)));
        }
    }
    match claim.at_most {
        Some(bound) if p.ci95[1] > bound => fails(format!("{words} reaches above {bound}")),
        _ => Standing::Holds(words),
    }
}
