package httphead

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte(okHead + "traceparent: " + parent + "\r\ntracestate: a=b\r\nContent-Length: 3\r\n\r\nabc"))
	f.Add([]byte("GET http://u:p@h/a?b HTTP/1.0\n\n"))
	f.Add([]byte("\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Add([]byte(okHead + "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\nCookie: x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, fr, err := ParseRequest(b)
		if err != nil {
			if Reason(err) == "unknown" || h != (Head{}) {
				t.Fatalf("error %v with head %+v", err, h)
			}
			return
		}
		if h.Method != "_OTHER" && !methods[h.Method] {
			t.Errorf("method %q", h.Method)
		}
		for _, s := range []string{h.Path, h.Host, h.TraceParent, h.TraceState} {
			if !utf8.ValidString(s) || strings.ContainsAny(s, "\r\n\x00") {
				t.Errorf("%q may not be exported", s)
			}
		}
		if len(h.Path) > MaxPath || len(h.Host) > MaxHost || len(h.TraceState) > MaxTraceState || len(h.TraceParent) > maxParentLen {
			t.Errorf("a field is too long: %+v", h)
		}
		if h.Linked() != (h.TraceID != [16]byte{}) || h.Linked() != (h.ParentID != [8]byte{}) || !h.Linked() && h.TraceState != "" {
			t.Errorf("half a link: %+v", h)
		}
		if fr.HeadBytes <= 0 || fr.HeadBytes > len(b) || fr.ContentLength < -1 || fr.Chunked && fr.ContentLength != -1 {
			t.Errorf("framing %+v of %d bytes", fr, len(b))
		}
	})
}

func FuzzParseResponse(f *testing.F) {
	f.Add([]byte(okReply+"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"), "POST")
	f.Add([]byte("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"), "HEAD")
	f.Add([]byte("HTTP/1.0 500\n\n"), "CONNECT")
	f.Fuzz(func(t *testing.T, b []byte, method string) {
		r, err := ParseResponse(b, method)
		if err != nil {
			if Reason(err) == "unknown" {
				t.Fatal(err)
			}
			return
		}
		if r.Status < 100 || r.Status > 999 || r.HeadBytes <= 0 || r.HeadBytes > len(b) || r.ContentLength < -1 {
			t.Errorf("%+v of %d bytes", r, len(b))
		}
		if r.Informational && (r.Upgrade || r.ContentLength != 0) {
			t.Errorf("%+v", r)
		}
	})
}
