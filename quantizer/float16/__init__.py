"""Detection of values beyond float16, and the modules that therefore compute in float32."""
