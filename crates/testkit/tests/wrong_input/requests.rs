//! Requests that no client should send: each is answered, none with a defect, and the daemon and its
//! sandboxes go on.

use std::io::Write;
use std::net::TcpStream;

use dormouse_testkit::http::{Answer, Call, Http};
use dormouse_testkit::sandbox::Sandbox;
use hyper::Method;
use serde_json::{Value, json};

use crate::place::{Place, assert_refused, dormouse, text};

const OPENAPI: &str = include_str!("../../../../openapi.json");

const IDS: [&str; 9] = [
    "..%2f..%2f..%2fetc%2fpasswd",
    "%00",
    "%0d%0aX-Evil:%201",
    "%ff%fe",
    "%27%3bDROP%20TABLE%20sandboxes",
    "-1",
    "null",
    "sssssssssssssssssssss",
    "%F0%9F%98%80",
];

fn bodies() -> Vec<Vec<u8>> {
    let mut bodies: Vec<Vec<u8>> = ["", "null", "[]", "5", "\"x\"", "{", "{\"a\":", "true"]
        .iter()
        .map(|body| body.as_bytes().to_vec())
        .collect();
    bodies.push(vec![0xff, 0xfe, 0x00]);
    bodies.push(b"[".repeat(100_000));
    bodies.push(b"{\"metadata\":".repeat(10_000));
    for wrong in
        [json!(null), json!(-1), json!(1e300), json!("x".repeat(70_000)), json!([[]]), json!({"a": {"b": 1}})]
    {
        let fields = [
            "templateID",
            "timeout",
            "metadata",
            "envVars",
            "autoPause",
            "count",
            "snapshotID",
            "name",
            "names",
            "alias",
            "network",
            "secure",
            "egress",
            "idle",
            "freezeAfterSeconds",
            "dormouse",
            "duration",
            "dockerfile",
        ];
        let body: serde_json::Map<String, Value> =
            fields.iter().map(|field| ((*field).to_owned(), wrong.clone())).collect();
        bodies.push(Value::Object(body).to_string().into_bytes());
    }
    bodies
}

/// Every method and path of the API, with `id` for each parameter.
fn endpoints(id: &str) -> Vec<(Method, String)> {
    let api: Value = serde_json::from_str(OPENAPI).unwrap();
    let mut found = Vec::new();
    for (path, methods) in api["paths"].as_object().unwrap() {
        let parts: Vec<&str> =
            path.split('/').map(|part| if part.starts_with('{') { id } else { part }).collect();
        for method in methods.as_object().unwrap().keys() {
            if let Ok(method) = method.to_uppercase().parse::<Method>() {
                found.push((method, parts.join("/")));
            }
        }
    }
    assert!(found.len() > 40, "{found:?}");
    found
}

/// 501 says what is not there on purpose. A stream of events does not end: its head is enough.
async fn send(http: &Http, method: &Method, path: &str, body: &[u8]) -> u16 {
    let headers = vec![("x-api-key", http.key.clone()), ("content-type", "application/json".to_owned())];
    let call = Call { method: method.clone(), path, headers, body: body.to_vec().into() };
    let answer = tokio::time::timeout(std::time::Duration::from_secs(60), http.open(call)).await;
    let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
    let answer = answer.unwrap_or_else(|_| panic!("{method} {path} {shown:?} is not answered"));
    let status =
        answer.unwrap_or_else(|error| panic!("{method} {path} {shown:?}: {error:#}")).status().as_u16();
    assert!(status < 500 || status == 501, "{method} {path} {shown:?} is answered {status}");
    status
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_to_every_endpoint_is_answered_and_costs_nothing() {
    let place = Place::new("garbage");
    let mut daemon = place.daemon().await;
    let sandbox = Sandbox::create(&daemon.http, json!({})).await.unwrap();
    let snapshot = sandbox.snapshot().await.unwrap();
    let http = daemon.http.clone();
    for id in IDS {
        for (method, path) in endpoints(id) {
            // These need no id and do as they are asked.
            if path.ends_with("/gc") {
                continue;
            }
            let status = send(&http, &method, &path, b"").await;
            let hostile = path.contains(id);
            assert!(
                !hostile || (400..500).contains(&status) || status == 501 || path.contains("metrics"),
                "{method} {path}: {status}"
            );
        }
    }
    // Of a real sandbox, with wrong bodies; what would end it is another test's.
    for (method, path) in endpoints(&sandbox.id) {
        if method != Method::POST && method != Method::PUT && method != Method::PATCH || path.ends_with("/gc")
        {
            continue;
        }
        let harmless = ["/pause", "/timeout", "/fork", "/freeze", "/thaw", "/refreshes", "/network", "/idle"];
        for body in bodies() {
            // An empty body is a whole request to some.
            if harmless.iter().any(|end| path.ends_with(end)) && (body.is_empty() || body == b"null") {
                continue;
            }
            send(&http, &method, &path, &body).await;
        }
    }
    http.api(Method::POST, &format!("/v2/sandboxes/{}/connect", sandbox.id), Some(json!({"timeout": 600})))
        .await
        .unwrap();
    assert_eq!(sandbox.sh("echo goes on").await.unwrap(), "goes on\n");
    let path = format!("/dormouse/v1/snapshots/{snapshot}");
    http.api(Method::GET, &path, None).await.unwrap().expect(200).unwrap();
    daemon.kill().unwrap();
    assert!(!place.log().contains("panicked"), "{}", place.log());
}

async fn refused(http: &Http, body: Value) -> Answer {
    http.api(Method::POST, "/v2/sandboxes", Some(body)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_create_names_what_is_wrong() {
    let place = Place::new("create");
    let daemon = place.daemon().await;
    let list = async || daemon.http.api(Method::GET, "/v2/sandboxes", None).await.unwrap().text();
    let before = list().await;
    let cases = [
        (json!({"templateID": "no-such"}), 404, "no-such"),
        (json!({"templateID": 5}), 400, "templateID"),
        (json!({}), 400, "templateID"),
        (json!({"templateID": "base", "timeout": "soon"}), 400, "timeout"),
        (json!({"templateID": "base", "timeout": -1}), 400, "timeout"),
        (json!({"templateID": "base", "metadata": {"k": 5}}), 400, "metadata"),
        (json!({"templateID": "base", "metadata": {"k": "v".repeat(70_000)}}), 400, "metadata"),
        (json!({"templateID": "base", "envVars": {"A=B": "x"}}), 400, "A=B"),
    ];
    for (body, status, word) in cases {
        let shown: String = body.to_string().chars().take(80).collect();
        let answer = refused(&daemon.http, body).await;
        assert_eq!(answer.status.as_u16(), status, "{shown}: {}", answer.text());
        assert!(answer.text().contains(word), "{shown}: {}", answer.text());
    }
    let huge = json!({"templateID": "base", "metadata": {"k": "v".repeat((1 << 20) + 1000)}});
    assert_eq!(refused(&daemon.http, huge).await.status.as_u16(), 413);
    assert_eq!(list().await, before, "one of them made a sandbox");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_slow_clients_do_not_keep_others_from_being_served() {
    let place = Place::new("slow");
    let daemon = place.daemon().await;
    let slow: Vec<TcpStream> = (0..600)
        .map(|number| {
            let mut stream = TcpStream::connect(&daemon.http.address).unwrap();
            let head = [
                "",
                "GET /health HTTP/1.1\r\n",
                "POST /v2/sandboxes HTTP/1.1\r\ncontent-length: 99\r\n\r\n{",
            ];
            stream.write_all(head[number % head.len()].as_bytes()).unwrap();
            stream
        })
        .collect();
    let sandbox = Sandbox::create(&daemon.http, json!({})).await.unwrap();
    assert_eq!(sandbox.sh("echo served").await.unwrap(), "served\n");
    drop(slow);
    let head = format!("GET /health HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(2 << 20));
    let mut stream = TcpStream::connect(&daemon.http.address).unwrap();
    // Cut off at the bound.
    drop(stream.write_all(head.as_bytes()));
    sandbox.sh("true").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_template_file_is_refused_with_its_line() {
    let place = Place::new("template");
    let daemon = place.daemon().await;
    let context = tempfile::tempdir().unwrap();
    let build = |file: &str| {
        std::fs::write(context.path().join("Dockerfile"), file).unwrap();
        let folder = context.path().to_string_lossy().into_owned();
        let url = format!("http://{}", daemon.http.address);
        let arguments =
            ["template", "build", &folder, "--name", "wrong", "--url", &url, "--key", &daemon.http.key];
        dormouse(&place.dir, &arguments, |_| {})
    };
    let cases = [
        ("FROM base\nRUN true\nEXPOSE 80\n", &["line 3", "EXPOSE"]),
        ("RUN true\n", &["line 1", "FROM"]),
        ("FROM no-such\n", &["line 1", "no-such"]),
        ("FROM base\nCOPY missing /x\n", &["line 2", "missing"]),
        ("FROM base\nCOPY ../../../etc/shadow /x\n", &["line 2", "outside"]),
        ("FROM base\nENV NAME\n", &["line 2", "ENV"]),
        ("FROM base\nRUN exit 3\n", &["line 2", "3"]),
    ];
    for (file, words) in cases {
        assert_refused(&build(file), words);
    }

    // An image that would write outside of its root.
    let layout = context.path().join("image");
    std::fs::create_dir(&layout).unwrap();
    let made =
        std::process::Command::new("python3").arg("-c").arg(EVIL_LAYOUT).arg(&layout).output().unwrap();
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert_refused(&build("FROM oci:image\n"), &["escaped"]);
    assert!(!place.dir.join("escaped").exists() && !place.dir.join("images/escaped").exists());
    let list = daemon.http.api(Method::GET, "/dormouse/v1/templates", None).await.unwrap().text();
    assert!(!list.contains("wrong"), "{list}");
}

const EVIL_LAYOUT: &str = r#"
import hashlib, io, json, os, sys, tarfile
root = sys.argv[1]
os.makedirs(f"{root}/blobs/sha256")
def blob(data):
    name = hashlib.sha256(data).hexdigest()
    open(f"{root}/blobs/sha256/{name}", "wb").write(data)
    return {"digest": f"sha256:{name}", "size": len(data)}
out = io.BytesIO()
with tarfile.open(fileobj=out, mode="w") as tar:
    entry = tarfile.TarInfo("../../escaped")
    entry.size = 4
    tar.addfile(entry, io.BytesIO(b"evil"))
layer = out.getvalue()
config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers",
    "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}}).encode()
manifest = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
    "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **blob(config)},
    "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", **blob(layer)}]}).encode()
index = {"schemaVersion": 2, "manifests": [{"mediaType": "application/vnd.oci.image.manifest.v1+json",
    "platform": {"architecture": "amd64", "os": "linux"}, **blob(manifest)}]}
open(f"{root}/index.json", "w").write(json.dumps(index))
open(f"{root}/oci-layout", "w").write(json.dumps({"imageLayoutVersion": "1.0.0"}))
"#;
