//go:build linux && amd64

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

// serve is the server that is watched: net/http, with a path for each kind of
// request.
func serve() error {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	lock, err := os.CreateTemp("", "receiverload-*.lock")
	if err != nil {
		return err
	}
	if err := os.Remove(lock.Name()); err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		chunks, _ := strconv.Atoi(r.URL.RawQuery)
		if chunks == 0 {
			_, _ = io.WriteString(w, `{"choices":[{"message":{"role":"assistant","content":"hello"}}]}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range chunks {
			if _, err := io.WriteString(w, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n"); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			time.Sleep(chunkGap)
		}
	})
	mux.HandleFunc("/lock", func(http.ResponseWriter, *http.Request) { contend(lock) })
	mux.HandleFunc("/spawn", func(http.ResponseWriter, *http.Request) { _ = exec.Command("true").Run() })
	fmt.Println(l.Addr())
	return http.Serve(l, mux)
}

// chunkGap is the time between two chunks of a stream.
const chunkGap = 10 * time.Millisecond

// contend waits 5 ms for a lock that another open file of the process holds.
func contend(lock *os.File) {
	holder, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", lock.Fd()))
	if err != nil {
		return
	}
	waiter, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", lock.Fd()))
	if err != nil {
		_ = holder.Close()
		return
	}
	defer waiter.Close()
	if err := syscall.Flock(int(holder.Fd()), syscall.LOCK_EX); err != nil {
		_ = holder.Close()
		return
	}
	time.AfterFunc(5*time.Millisecond, func() { _ = holder.Close() })
	_ = syscall.Flock(int(waiter.Fd()), syscall.LOCK_EX)
}

// startServer starts the server in a process of its own.
func startServer() (cmd *exec.Cmd, addr string, err error) {
	cmd = exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"=server")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, "", fmt.Errorf("the server did not come up: %w", err)
	}
	return cmd, line[:len(line)-1], nil
}
