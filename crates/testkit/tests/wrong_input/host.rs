//! Hosts that cannot run sandboxes, and addresses and folders that are taken.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use crate::place::{Place, assert_refused, binary, dormouse};

fn serve(dir: &Path, listen: &str, change: impl FnOnce(&mut std::process::Command)) -> std::process::Output {
    dormouse(dir, &["serve", "--listen", listen], change)
}

const ANY: &str = "127.0.0.1:0";

#[test]
fn a_host_without_runsc_is_told_what_installs_it() {
    let dir = tempfile::tempdir().unwrap();
    let output = serve(dir.path(), ANY, |command| {
        command.env("PATH", dir.path());
    });
    assert_refused(&output, &["runsc", "missing", "dormouse setup"]);
}

#[test]
fn a_runsc_that_will_not_do_is_named_with_the_reason() {
    let kinds = [
        ("echo 'runsc version release-20190101.0'", "too old"),
        ("echo gibberish", "gibberish"),
        ("exit 3", "does not say its version"),
        ("kill -SEGV $$", "does not say its version"),
    ];
    for (script, word) in kinds {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        let runsc = bin.join("runsc");
        std::fs::write(&runsc, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&runsc, std::fs::Permissions::from_mode(0o755)).unwrap();
        let output = serve(dir.path(), ANY, |command| {
            command.env("PATH", &bin);
        });
        assert_refused(&output, &["bin/runsc", word, "dormouse setup"]);
    }
}

#[test]
fn who_is_not_root_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    // Where it was built others may not be able to look.
    let program = dir.path().join("dormouse");
    std::fs::copy(binary(), &program).unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::os::unix::fs::chown(&data, Some(65534), Some(65534)).unwrap();
    let mut command = std::process::Command::new(&program);
    command.args(["serve", "--listen", ANY, "--data-dir"]).arg(&data).uid(65534).gid(65534).current_dir("/");
    assert_refused(&command.output().unwrap(), &["root"]);
}

#[test]
fn an_address_that_is_taken_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    assert_refused(&serve(dir.path(), &address, |_| {}), &[&address, "in use", "--listen"]);
    assert_refused(&serve(dir.path(), "nonsense", |_| {}), &["nonsense", "--listen"]);
}

#[test]
fn a_data_folder_that_cannot_be_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert_refused(&serve(&file, ANY, |_| {}), &[file.to_str().unwrap(), "--data-dir"]);
    assert_eq!(std::fs::read(&file).unwrap(), b"");
    assert_refused(&serve(Path::new("/proc/dormouse"), ANY, |_| {}), &["/proc/dormouse", "--data-dir"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_daemon_on_one_folder_is_refused_and_the_first_goes_on() {
    let place = Place::new("second");
    let daemon = place.daemon().await;
    let folder = place.dir.to_string_lossy().into_owned();
    let output = serve(&place.dir, ANY, |_| {});
    assert_refused(&output, &[&folder, "in use", &daemon.pid().to_string(), "--data-dir"]);
    let call = dormouse_testkit::http::Call { path: "/health", ..Default::default() };
    assert!(daemon.http.send(call).await.unwrap().status.is_success());
}

#[test]
fn a_disk_that_is_full_at_the_start_is_said_to_be() {
    let dir = tempfile::tempdir().unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let status = std::process::Command::new(program).args(arguments).arg(dir.path()).status().unwrap();
        assert!(status.success(), "{program}");
    };
    run("mount", &["-t", "tmpfs", "-o", "size=1m", "tmpfs"]);
    let output = serve(dir.path(), ANY, |_| {});
    run("umount", &["-l"]);
    assert_refused(&output, &[dir.path().to_str().unwrap(), "No space left"]);
}
