//go:build !linux || !amd64

package ebpfllmreceiver

import (
	"context"
	"errors"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/receiver"
)

var errLinuxOnly = errors.New("the ebpfllm receiver needs Linux on x86-64: remove it from the pipelines of collectors on other systems")

func createTraces(context.Context, receiver.Settings, component.Config, consumer.Traces) (receiver.Traces, error) {
	return nil, errLinuxOnly
}

func createMetrics(context.Context, receiver.Settings, component.Config, consumer.Metrics) (receiver.Metrics, error) {
	return nil, errLinuxOnly
}
