//! Files that are either complete or absent: written beside their target, forced to disk, renamed.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// Large enough that a checkpoint is written in few system calls, small enough to stay in the second-level cache.
const BUFFER_BYTES: usize = 1 << 20;

/// How temporary files end. They begin with a dot and their target's name.
const TEMP_SUFFIX: &str = ".tilewright.tmp";

/// A file under construction. [`commit`](AtomicFile::commit) makes it appear under its name, whole and on disk; dropped before that, nothing is left.
///
/// The data streams through, so a checkpoint needs no second copy in memory.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    temp: PathBuf,
    // Taken by `commit`; `Some` on drop means that the file was abandoned.
    file: Option<BufWriter<File>>,
}

impl AtomicFile {
    /// Starts a file that will replace `path`. Its folder must exist.
    pub fn create(path: &Path) -> Result<Self> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let Some(name) = path.file_name() else {
            let what = format!("`{}` does not name a file", path.display());
            return Err(Error::config(what, "give a file name, not a folder"));
        };
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let mut temp_name = OsString::from(".");
        temp_name.push(name);
        temp_name.push(format!(".{}-{serial}{TEMP_SUFFIX}", std::process::id()));
        let temp = path.with_file_name(temp_name);
        // A file of this name is the leftover of a dead process that had our id.
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(&temp);
        let file = file.map_err(Error::io("create", &temp))?;
        Ok(AtomicFile { path: path.to_owned(), temp, file: Some(BufWriter::with_capacity(BUFFER_BYTES, file)) })
    }

    /// The name that the file will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn buffer(&mut self) -> &mut BufWriter<File> {
        self.file.as_mut().expect("present until commit")
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.buffer().write_all(bytes).map_err(Error::io("write", &self.temp))
    }

    /// Overwrites bytes already written, for a count that is known only at the end.
    pub fn patch(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let buffer = self.buffer();
        let mut patch = || {
            buffer.seek(SeekFrom::Start(offset))?;
            buffer.write_all(bytes)?;
            buffer.seek(SeekFrom::End(0)).map(|_| ())
        };
        patch().map_err(Error::io("write", &self.temp))
    }

    /// Forces the data to disk, gives the file its name, and forces the name to disk.
    pub fn commit(mut self) -> Result<()> {
        let mut buffer = self.file.take().expect("present until commit");
        let result =
            buffer.flush().and_then(|()| buffer.get_ref().sync_all()).map_err(Error::io("write", &self.temp)).and_then(
                |()| {
                    drop(buffer);
                    fs::rename(&self.temp, &self.path).map_err(Error::io("rename to", &self.path))
                },
            );
        if result.is_err() {
            let _ = fs::remove_file(&self.temp);
        }
        result.and_then(|()| sync_folder_of(&self.path))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(buffer) = self.file.take() {
            // `into_parts` drops the buffered bytes instead of writing them.
            drop(buffer.into_parts());
            let _ = fs::remove_file(&self.temp);
        }
    }
}

/// Writes a small file as [`AtomicFile`] does.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.commit()
}

/// Forces the entry of `path` in its folder to disk, so that a rename, creation or removal survives a power cut.
pub fn sync_folder_of(path: &Path) -> Result<()> {
    // Other systems cannot open a folder as a file, and need not.
    if cfg!(unix) {
        let folder = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        File::open(folder).and_then(|f| f.sync_all()).map_err(Error::io("sync folder", folder))?;
    }
    Ok(())
}

/// Removes what killed processes left half-written in `folder` and returns how many files that were. Only for a folder that nobody else is writing to.
pub fn remove_abandoned(folder: &Path) -> Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        let ours = path.file_name().and_then(|n| n.to_str());
        if ours.is_some_and(|n| n.starts_with('.') && n.ends_with(TEMP_SUFFIX)) {
            fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_only_at_commit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        let mut file = AtomicFile::create(&path).unwrap();
        file.write(b"hello").unwrap();
        assert!(!path.exists());
        file.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"hello");
        assert_eq!(names(dir.path()), ["a.bin"]);
    }

    #[test]
    fn an_abandoned_file_leaves_the_old_content_and_no_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        write_atomic(&path, b"old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.write(&vec![1; 3 << 20]).unwrap();
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(dir.path()), ["a.bin"]);
    }

    #[test]
    fn a_patch_changes_the_past_and_writing_goes_on_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        let mut file = AtomicFile::create(&path).unwrap();
        file.write(b"count=?;").unwrap();
        file.patch(6, b"7").unwrap();
        file.write(b"end").unwrap();
        file.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"count=7;end");
    }

    #[test]
    fn a_missing_folder_is_an_error_with_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let message = write_atomic(&dir.path().join("no/such/a.bin"), b"").unwrap_err().to_string();
        assert!(message.contains("create") && message.contains("a.bin"), "{message}");
    }

    #[test]
    fn a_path_without_a_file_name_is_refused() {
        assert!(AtomicFile::create(Path::new("/")).is_err());
    }

    #[test]
    fn leftovers_of_a_killed_process_are_swept_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(".model.bin.99-0.tilewright.tmp"), b"half").unwrap();
        fs::write(dir.path().join("notes.tmp"), b"mine").unwrap();
        assert_eq!(remove_abandoned(dir.path()).unwrap(), 1);
        assert_eq!(names(dir.path()), ["notes.tmp"]);
    }

    #[test]
    fn a_failed_rename_removes_the_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), b"").unwrap();
        assert!(write_atomic(&path, b"x").is_err());
        assert_eq!(names(dir.path()), ["taken"]);
    }
}
