//! What a path in a request means.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use crate::users::User;

/// The kernel's PATH_MAX, its terminating zero counted.
const PATH_BYTES_MAX: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error("path {0:?} names another user's home directory: only ~ and ~/… are expanded")]
    OtherHome(String),
    #[error("path {0:?} holds a zero byte")]
    ZeroByte(String),
    #[error("a path of {0} bytes is longer than the {PATH_BYTES_MAX} that the kernel takes")]
    TooLong(usize),
}

/// The absolute path of what a request names: relative ones start at the default working directory
/// where the sandbox has one, else at the user's home; `~` is that home. `.` and `..` are resolved in
/// the text, as E2B does, so `link/..` is the directory of the link.
pub fn resolve(given: &str, user: &User, workdir: Option<&Path>) -> Result<PathBuf, PathError> {
    if given.contains('\0') {
        return Err(PathError::ZeroByte(shorten(given)));
    }
    let joined = match given.strip_prefix('~') {
        Some("") => user.home.clone(),
        Some(rest) if rest.starts_with('/') => user.home.join(rest.trim_start_matches('/')),
        Some(_) => return Err(PathError::OtherHome(shorten(given))),
        None => workdir.unwrap_or(&user.home).join(given),
    };
    let path = clean(&joined);
    let bytes = path.as_os_str().len();
    if bytes >= PATH_BYTES_MAX { Err(PathError::TooLong(bytes)) } else { Ok(path) }
}

fn shorten(given: &str) -> String {
    given.chars().take(200).collect()
}

/// An absolute path without `.`, `..` and doubled slashes.
fn clean(path: &Path) -> PathBuf {
    let mut parts: Vec<&std::ffi::OsStr> = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => parts.push(part),
            Component::ParentDir => {
                parts.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    let mut clean = OsString::from("/");
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            clean.push("/");
        }
        clean.push(part);
    }
    PathBuf::from(clean)
}

/// The last name of a path; of the root, `/`.
#[must_use]
pub fn base_name(path: &Path) -> String {
    path.file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn user() -> User {
        User {
            name: "user".into(),
            uid: 1000,
            gid: 1000,
            home: "/home/user".into(),
            shell: "/bin/sh".into(),
            groups: vec![1000],
        }
    }

    fn at_home(given: &str) -> String {
        resolve(given, &user(), None).unwrap().to_str().unwrap().to_owned()
    }

    #[test]
    fn paths_start_at_home() {
        for (given, wanted) in [
            ("", "/home/user"),
            (".", "/home/user"),
            ("a", "/home/user/a"),
            ("a/../b//c/", "/home/user/b/c"),
            ("~", "/home/user"),
            ("~/", "/home/user"),
            ("~/a", "/home/user/a"),
            ("a~", "/home/user/a~"),
            ("/", "/"),
            ("/etc/./x/../passwd", "/etc/passwd"),
            ("../../../../x", "/x"),
            ("/a/", "/a"),
        ] {
            assert_eq!(at_home(given), wanted, "{given:?}");
        }
    }

    #[test]
    fn a_working_directory_replaces_home_for_relative_paths() {
        let resolved = |given: &str| resolve(given, &user(), Some(Path::new("/app"))).unwrap();
        assert_eq!(resolved("x"), Path::new("/app/x"));
        assert_eq!(resolved(""), Path::new("/app"));
        assert_eq!(resolved("~/x"), Path::new("/home/user/x"));
        assert_eq!(resolved("/x"), Path::new("/x"));
    }

    #[test]
    fn hostile_paths_are_refused() {
        assert!(matches!(resolve("~root/x", &user(), None), Err(PathError::OtherHome(_))));
        assert!(matches!(resolve("a\0b", &user(), None), Err(PathError::ZeroByte(_))));
        assert!(matches!(resolve(&"a/".repeat(3000), &user(), None), Err(PathError::TooLong(_))));
    }

    proptest! {
        #[test]
        fn what_is_resolved_is_absolute_clean_and_stable(given in "[a.~/]{0,20}") {
            if let Ok(path) = resolve(&given, &user(), None) {
                let text = path.to_str().unwrap();
                prop_assert!(text.starts_with('/'));
                prop_assert!(!text.contains("//"));
                prop_assert!(text.split('/').all(|part| part != "." && part != ".."));
                prop_assert_eq!(resolve(text, &user(), None), Ok(path.clone()));
            }
        }

        #[test]
        fn names_survive(parts in proptest::collection::vec("[^/\\x00~]{1,12}", 1..5)) {
            prop_assume!(parts.iter().all(|part| part != "." && part != ".."));
            let given = format!("/{}", parts.join("/"));
            prop_assert_eq!(resolve(&given, &user(), None).unwrap(), PathBuf::from(given));
        }
    }
}
