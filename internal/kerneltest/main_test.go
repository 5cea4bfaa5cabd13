//go:build linux

package kerneltest

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// With this in the environment the test binary is a server in Go.
const (
	serveEnv  = "EBPFLLM_KERNELTEST_SERVE"
	engineEnv = "EBPFLLM_KERNELTEST_ENGINE" // the Unix socket of an engine
)

// The main thread stands for the process in /proc/self: a test that takes its thread into another network must not be on it.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	if executable := os.Getenv(receiverEnv); executable != "" {
		if err := runReceiver(executable); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if addr := os.Getenv(serveEnv); addr != "" {
		serveGo(addr)
		return
	}
	code := m.Run()
	for _, compiled := range []func() (string, error){compile, compileSockets} {
		if binary, err := compiled(); err == nil && binary != os.Getenv(builtServer) {
			_ = os.Remove(binary)
		}
	}
	os.Exit(code)
}

// serveGo is a server of net/http: goroutines that move between threads.
func serveGo(addr string) {
	number := func(r *http.Request) int {
		n, _ := strconv.Atoi(r.URL.RawQuery)
		return n
	}
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprintln(w, "hello")
	})
	http.HandleFunc("/sleep", func(_ http.ResponseWriter, r *http.Request) {
		<-time.After(time.Duration(number(r)) * time.Millisecond)
	})
	http.HandleFunc("/stream", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range number(r) {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			<-time.After(2 * time.Millisecond)
		}
	})
	http.HandleFunc("/file", func(w http.ResponseWriter, r *http.Request) {
		http.ServeFile(w, r, os.Args[0]) // by sendfile
	})
	http.HandleFunc("/flock", func(_ http.ResponseWriter, _ *http.Request) {
		f, err := os.OpenFile(os.Getenv("LOCK"), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			panic(err)
		}
		defer f.Close()
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
			panic(err)
		}
	})
	http.HandleFunc("/exec", func(_ http.ResponseWriter, r *http.Request) {
		panic(syscall.Exec("/bin/sh", []string{"sh", "-c", os.Getenv(fmt.Sprint("EXEC", number(r)))}, os.Environ()))
	})
	http.HandleFunc("/engine/", func(_ http.ResponseWriter, r *http.Request) {
		engine, err := net.Dial("unix", os.Getenv(engineEnv))
		if err != nil {
			panic(err)
		}
		defer engine.Close()
		if _, err := fmt.Fprintf(engine, "%s %d\n", strings.TrimPrefix(r.URL.Path, "/engine"), number(r)); err != nil {
			panic(err)
		}
		if _, err := engine.Read(make([]byte, 16)); err != nil {
			panic(err)
		}
	})
	fmt.Println("ready")
	panic(http.ListenAndServe(addr, nil))
}
