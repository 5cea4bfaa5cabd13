// Command llmserver is a small language-model server to look at with ebpfllm:
// an OpenAI-compatible HTTP API, with server-sent events or without, in front
// of a mixture of experts whose weights are a memory-mapped file.
//
// The weights are random, so its answers mean nothing, but what it does to get
// them is what a real server does: every token reads pages of the mapping and
// computes with them, every request saves its state in a file under an advisory
// lock, and every token leaves through the socket as it is made. A cold page
// cache, a held lock, a stolen CPU or a slow reader therefore cost it the same
// kind of time as they cost a real one. Nothing in it sleeps.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "llmserver:", err)
		os.Exit(1)
	}
}

func run() error {
	listen := flag.String("listen", "127.0.0.1:8080", "`address` to serve on; port 0 takes a free one, which is then printed")
	dir := flag.String("dir", "", "`directory` for the weights, the state file and its lock; must lie on a disk (default: a temporary one)")
	size := flag.Int("weights-mib", 64, "size of the weights in `MiB`")
	layers := flag.Int("layers", 32, "matrices, and so pages of weights, that each token passes through")
	uninstrumented := flag.Bool("uninstrumented", false, "run without the OpenTelemetry SDK")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; see -help", flag.Arg(0))
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if *dir == "" {
		temporary, err := os.MkdirTemp("", "llmserver-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(temporary)
		*dir = temporary
	}
	weights, err := openWeights(filepath.Join(*dir, "weights.bin"), *size)
	if err != nil {
		return err
	}
	defer weights.close()
	m, err := newModel(weights.pages, *layers)
	if err != nil {
		return err
	}
	slot, err := newSlotFile(*dir)
	if err != nil {
		return err
	}

	handler := newAPI(m, slot).routes()
	if !*uninstrumented {
		shutdown, err := startTelemetry(ctx)
		if err != nil {
			return err
		}
		defer shutdown()
		handler = instrument(handler)
	}

	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	fmt.Printf("listening on http://%s\n", listener.Addr())

	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	slog.Info("shutting down")
	deadline, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := server.Shutdown(deadline); err != nil {
		return errors.Join(fmt.Errorf("requests still running after 5 s: %w", err), server.Close())
	}
	return nil
}
